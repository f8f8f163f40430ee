"""Conditions of a template are recorded and forced, and marking them changes nothing else."""

from typing import Any

from support.templates import chatml_with
from unbroken.rendering.jinja.chat_template import ChatTemplate

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def render(condition: str, *, reaches_all: bool = True, **forced: bool) -> tuple[str, frozenset[tuple[int, bool]]]:
    """What is written after the messages, and the outcomes of the condition's parts."""
    template = ChatTemplate(f"{{%- if {condition} -%}}yes{{%- else -%}}no{{%- endif -%}}", {})
    marked, conditions = template.mark_conditions(reaches_all=reaches_all)
    conditions.forced = {int(name.removeprefix("n")): value for name, value in forced.items()}
    return marked.render(MESSAGES, add_generation_prompt=True), conditions.take_outcomes()


def test_each_part_of_a_condition_has_a_number_and_an_outcome() -> None:
    text, outcomes = render("messages | length > 9 and 'hi' in messages[0].content")
    assert (text, outcomes) == ("no", {(0, False), (1, True)})


def test_a_forced_part_keeps_its_own_outcome_in_the_record() -> None:
    text, outcomes = render("messages | length > 9 and 'hi' in messages[0].content", n0=True)
    assert (text, outcomes) == ("yes", {(0, False), (1, True)})


def test_a_part_that_protects_another_is_not_evaluated_with_it() -> None:
    missing = "messages[3] is defined and messages[3].content == 'x'"
    assert render(missing) == ("no", frozenset())
    assert render("not loop is defined or loop.first")[0] == "yes"


def test_without_reaching_all_a_part_that_decides_is_the_last_to_be_evaluated() -> None:
    _, outcomes = render("messages | length > 9 and 'hi' in messages[0].content", reaches_all=False)
    assert outcomes == {(0, False)}


def test_a_marked_template_writes_the_same() -> None:
    template = ChatTemplate(chatml_with(before_prompt="{{ 'a' if messages | length > 9 else 'b' }}"), {})
    marked, conditions = template.mark_conditions(reaches_all=True)
    conversation: list[Any] = [*MESSAGES, {"role": "assistant", "content": "so"}, *MESSAGES]
    for prompt in (True, False):
        expected = template.render(conversation, add_generation_prompt=prompt)
        assert marked.render(conversation, add_generation_prompt=prompt) == expected
    assert conditions.take_outcomes() != frozenset()
    assert conditions.take_outcomes() == frozenset()
