"""History classes: what the facts of a history are, what they cost, and which bridges depend on them (I1)."""

from typing import Any

import pytest

from support.templates import chatml_with
from support.tokenizers import make_tokenizer
from unbroken.rendering.base import Bridge, Refusal, RefusalReason
from unbroken.rendering.bridge.histories.history_class import HistoryClass
from unbroken.rendering.bridge.histories.history_facts import HistoryReader
from unbroken.rendering.template import TemplateRenderer

EXTRA = "{{- '<|im_start|>system\\nextra<|im_end|>\\n' -}}"
SYSTEM: Any = {"role": "system", "content": "be short"}
USER: Any = {"role": "user", "content": "hi"}
TURN: Any = {"role": "assistant", "content": "so"}


def before_prompt_when(condition: str) -> str:
    loop = f"{{%- set ns = namespace(on=false) -%}}{{%- for message in messages -%}}{{%- if {condition} -%}}"
    switch = "{%- set ns.on = true -%}{%- endif -%}{%- endfor -%}"
    return chatml_with(before_prompt=f"{loop}{switch}{{%- if ns.on -%}}{EXTRA}{{%- endif -%}}")


def bridge(template: str, history: list[Any], new: Any = USER) -> Any:
    tokenizer = make_tokenizer(template)
    stop = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return TemplateRenderer(tokenizer).bridge_to_next_turn([], stop, [new], assistant=TURN, earlier=history)


def test_i1_a_word_that_the_history_does_not_have_does_not_matter() -> None:
    template = before_prompt_when("'/fast' in message.content")
    assert isinstance(bridge(template, [USER]), Bridge)
    for place in (SYSTEM, USER, TURN):
        with_word = {**place, "content": "go /fast"}
        outcome = bridge(template, [SYSTEM, USER, TURN, USER, with_word])
        assert isinstance(outcome, Refusal)
        assert outcome.reason is RefusalReason.HISTORY_DEPENDENT


def test_i1_a_system_message_in_the_middle_is_a_system_message() -> None:
    template = before_prompt_when("message.role == 'system'")
    assert isinstance(bridge(template, [USER, TURN, USER]), Bridge)
    assert isinstance(bridge(template, [USER, SYSTEM, USER]), Refusal)


def test_i1_a_history_of_a_system_message_alone_is_in_the_panel() -> None:
    is_flag = "messages[loop.index0 - 1].role == 'user' and not loop.first"
    assert isinstance(bridge(before_prompt_when(is_flag), [SYSTEM]), Refusal)


@pytest.mark.parametrize(
    ("history", "is_regular"),
    [
        ([USER], True),
        ([SYSTEM, USER, TURN, USER], True),
        ([SYSTEM], False),
        ([USER, TURN], False),
        ([TURN, USER], False),
        ([USER, {"role": "developer", "content": "x"}, USER], False),
        ([{**USER, "key": "x"}], False),
    ],
)
def test_a_regular_history_has_its_messages_in_the_usual_order(history: list[Any], is_regular: bool) -> None:
    assert HistoryReader([]).read(history).is_regular is is_regular


@pytest.mark.parametrize(
    ("history", "has_system"), [([SYSTEM, USER], True), ([USER], False), ([USER, TURN, SYSTEM], None)]
)
def test_a_history_without_a_system_message_has_none_anywhere(history: list[Any], has_system: bool | None) -> None:
    assert HistoryReader([]).read(history).has_system is has_system
    for value in (True, False):
        assert HistoryClass(has_system=value).includes(history) is (has_system is value)


def test_a_history_that_grew_is_read_from_where_it_was() -> None:
    reader = HistoryReader(["/fast"])
    history = [USER]
    for number in range(50):
        history = [*history, {**TURN}, {"role": "user", "content": f"more {number}"}]
        assert not reader.read(history).texts
    assert reader.num_read == 101
    fork = [*history[:51], {"role": "user", "content": "go /FAST"}]
    assert reader.read(fork).texts == {"/fast"}
    assert not reader.read(history).texts
