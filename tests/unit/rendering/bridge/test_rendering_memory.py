"""A remembered rendering is the one that would be made, also while conditions are forced."""

import itertools
from typing import Any

import pytest

from support.templates import chatml_with
from unbroken.errors import TemplateError
from unbroken.rendering.bridge.certificates.rendering_memory import RenderingMemory
from unbroken.rendering.jinja.chat_template import ChatTemplate

TEMPLATE = chatml_with(
    before_prompt="{%- if 'hi' in messages[0].content -%}{{- 'a' -}}"
    "{%- if messages | length > 3 or messages[0].content == 'hi' -%}{{- 'b' -}}{%- endif -%}"
    "{%- elif messages[0].content.startswith('y') -%}{{- 'c' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- 'd' if m.content == 'hi' else 'e' -}}{%- endfor -%}"
)


def say(*texts: str) -> list[Any]:
    return [{"role": "user", "content": text} for text in texts]


CONVERSATIONS = [say("hi"), say("yes"), say("no"), say("hi", "no"), say("no", "hi", "hi", "hi")]


def test_i1_what_is_remembered_is_what_is_rendered_whatever_is_forced() -> None:
    marked, conditions = ChatTemplate(TEMPLATE, {}).mark_conditions(reaches_all=True)
    anew, other_conditions = ChatTemplate(TEMPLATE, {}).mark_conditions(reaches_all=True)
    memory = RenderingMemory(marked, conditions)
    ways: list[dict[int, bool]] = [{}]
    for numbers in (*itertools.combinations(range(5), 1), *itertools.combinations(range(5), 2)):
        ways += [
            dict(zip(numbers, values, strict=True)) for values in itertools.product((True, False), repeat=len(numbers))
        ]
    for forced in (*ways, *reversed(ways)):
        conditions.forced = other_conditions.forced = forced
        for messages in CONVERSATIONS:
            text = memory.render(messages, add_generation_prompt=True)
            assert text == anew.render(messages, add_generation_prompt=True), (forced, messages)
            assert conditions.take_outcomes() == other_conditions.take_outcomes(), (forced, messages)
    assert memory.num_renderings < len(ways) * len(CONVERSATIONS) / 2


def test_a_conversation_with_other_tools_or_another_end_is_rendered_anew() -> None:
    memory = RenderingMemory(ChatTemplate("{{ messages | length }}{{ tools }}{{ add_generation_prompt }}", {}))
    tools: list[Any] = [{"type": "function", "function": {"name": "add"}}]
    texts = {
        memory.render(messages, tools=own, add_generation_prompt=prompt)
        for messages in (say("a"), say("a", "b"))
        for own in ([], tools)
        for prompt in (True, False)
    }
    assert len(texts) == memory.num_renderings == 8


def test_a_refusal_is_remembered_until_all_is_forgotten() -> None:
    memory = RenderingMemory(ChatTemplate("{{ raise_exception('never') }}", {}))
    for num_renderings in (1, 1, 2):
        if num_renderings == 2:
            memory.forget()
        with pytest.raises(TemplateError, match="never"):
            memory.render(say("a"), add_generation_prompt=True)
        assert memory.num_renderings == num_renderings


def test_messages_that_cannot_be_compared_are_rendered_each_time() -> None:
    memory = RenderingMemory(ChatTemplate("{{ messages[0].content }}", {}))
    for number in range(2):
        assert memory.render([{"role": "user", "content": RuntimeError("x")}], add_generation_prompt=True) == "x"
        assert memory.num_renderings == number + 1
