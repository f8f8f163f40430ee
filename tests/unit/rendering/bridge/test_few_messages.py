"""I1 in long conversations, where a few messages show the end of the turn: only if the long one's text is theirs."""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from support import templates
from support.template_generator import conversations_of, random_template, random_tools
from support.tokenizers import make_tokenizer
from unbroken.errors import UnbrokenError
from unbroken.rendering.base import Bridge, BridgeOutcome
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

NUM_MESSAGES = 40
RESULT: Any = {"role": "tool", "tool_call_id": "call00099", "name": "read", "content": "the 99th line"}


def call_number(number: int) -> Any:
    function = {"name": "read", "arguments": {"line": number, "path": "a.py"}}
    return {
        "role": "assistant",
        "content": f"Line {number}.",
        "tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": function}],
    }


def long_history(third: str = "the first line") -> list[Any]:
    history: list[Any] = [{"role": "user", "content": "Read all lines."}]
    while len(history) < NUM_MESSAGES:
        number = len(history) // 2
        text = third if len(history) == 1 else f"line {number}"
        history += [call_number(number), {**RESULT, "tool_call_id": f"call{number:05d}", "content": text}]
    return history


def bridge(
    renderer: TemplateRenderer, history: list[Any], new: Any = RESULT, sampled: Sequence[int] = ()
) -> BridgeOutcome:
    completion_ids = token_ids([*sampled, *stop_of(renderer)])
    return renderer.bridge_to_next_turn(
        token_ids([]), completion_ids, [new], assistant=call_number(99), earlier=history
    )


def stop_of(renderer: TemplateRenderer) -> list[int]:
    stop_id = renderer._encoder.control.get_id("<|im_end|>")
    assert stop_id is not None
    return [stop_id]


def read(outcome: BridgeOutcome) -> Any:
    if not isinstance(outcome, Bridge):
        return outcome
    ids, indices = np.asarray(outcome.bridge_ids).tolist(), np.asarray(outcome.message_indices).tolist()
    return ids, indices, outcome.closing, outcome.num_closing, outcome.num_taken_back, outcome.history


def read_both(template: str, history: list[Any], new: Any = RESULT) -> tuple[Any, Any]:
    """The bridge whose glue a few messages may show, as the prompt is known; and the one that all messages show."""
    tokenizer = make_tokenizer(template)
    known, unknown = TemplateRenderer(tokenizer), TemplateRenderer(tokenizer)
    known.render(history)
    return read(bridge(known, history, new)), read(bridge(unknown, history, new))


IS_LATE = "loop.index > 9"
TURN_END = "+ '<|im_end|>"
SAID = "messages[:loop.index0] | map(attribute='content') | list"


def chatml_with(text: str) -> str:
    """ChatML with a text at the end of each late turn, inside of it."""
    template: str = templates.CHATML
    return template.replace(TURN_END, f"+ ({text} if message.role == 'assistant' and {IS_LATE} else '') {TURN_END}")


HABITS = {
    "reminds": chatml_with("' Remember: read all lines.'"),
    "quotes a message": chatml_with("messages[2].content"),
    "ends the turn twice": chatml_with("'<|im_end|>\\n<|im_start|>user\\nGo on.'"),
    "drops what was said": templates.CHATML.replace(
        "message.content +", f"('' if {IS_LATE} and message.content in {SAID} else message.content) +"
    ),
    "counts": templates.CHATML.replace("message.role +", "message.role + loop.index | string +"),
    "asks for more": templates.CHATML.replace(
        TURN_END, f"+ (' Go on.' if loop.last and {IS_LATE} and message.role == 'tool' else '') {TURN_END}"
    ),
}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("third", ["the first line", "<|im_end|>\n<|im_start|>tool\nthe 99th line"])
@pytest.mark.parametrize("new", [RESULT, {**RESULT, "content": "the first line"}], ids=["new", "said before"])
def test_what_a_template_does_in_long_conversations_only_is_in_the_bridge_or_refused(
    habit: str, third: str, new: Any
) -> None:
    with_few, with_all = read_both(HABITS[habit], long_history(third), new)
    assert with_few == with_all


@pytest.mark.parametrize("seed", range(10))
def test_a_bridge_that_few_messages_show_is_the_one_that_all_show(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = make_tokenizer(random_template(rng).source)
    tools = random_tools(rng)
    for history, turn, new, _ in conversations_of(rng, 6):
        long = history * (1 + NUM_MESSAGES // len(history))
        outcomes = []
        for is_known in (False, True):
            renderer = TemplateRenderer(tokenizer)
            if is_known:
                with suppress(UnbrokenError):
                    renderer.render(long, tools=tools)
            stop = token_ids(stop_of(renderer))
            outcomes.append(
                read(renderer.bridge_to_next_turn(token_ids([]), stop, new, assistant=turn, tools=tools, earlier=long))
            )
        assert outcomes[0] == outcomes[1]


CALL = '\n<tool_call>\n{"name": "read", "arguments": {"line": 99, "path": "a.py"}}\n</tool_call>'


@pytest.mark.parametrize(("template", "sampled"), [(templates.CHATML, "Line 99."), (templates.QWEN, f"Line 99.{CALL}")])
def test_a_turn_of_a_long_conversation_renders_it_once(
    template: str, sampled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    history = long_history()
    renderer.render(history)
    lengths: list[int] = []
    render = ChatTemplate.render

    def count(self: ChatTemplate, messages: Any, **options: Any) -> str:
        lengths.append(len(messages))
        return render(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", count)
    for _ in range(3):
        assert isinstance(bridge(renderer, history, sampled=ids), Bridge)
        history = [*history, call_number(99), RESULT]
        assert [length for length in lengths if length >= NUM_MESSAGES] == [len(history)]
        lengths.clear()


@pytest.mark.parametrize(
    "change",
    [
        lambda history: history[2].update(content="<|im_end|> was changed"),
        lambda history: history[3]["tool_calls"][0]["function"]["arguments"].update(line=True),
        lambda history: history[3]["tool_calls"][0]["function"]["arguments"].update(
            line=history[3]["tool_calls"][0]["function"]["arguments"].pop("line")
        ),
        lambda history: history[1].update(content=[{"type": "text", "text": "Line 1"}]),
    ],
    ids=["a text", "a number that is equal", "the order of arguments", "parts"],
)
def test_a_message_that_its_caller_changes_between_turns_is_rendered_as_it_is_then(change: Any) -> None:
    renderer = TemplateRenderer(make_tokenizer(templates.QWEN))
    history = long_history()
    bridge(renderer, history)
    history += [call_number(99), RESULT]
    rendered: list[str] = []
    for fresh in (renderer, TemplateRenderer(make_tokenizer(templates.QWEN))):
        if fresh is renderer:
            assert fresh._recent.find(history, ()) is not None
            change(history)
        assert fresh._recent.find(history, ()) is None
        bridge(fresh, history)
        known = fresh._recent.find([*history, call_number(99), RESULT], ())
        assert known is not None
        rendered.append(known.text)
    assert rendered[0] == rendered[1]
