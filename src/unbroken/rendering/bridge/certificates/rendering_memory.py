"""Remembers the renderings of an examination, so that the same conversation is rendered once.

An examination asks for many conversations several times, most of all while conditions are forced: two renderings of
one conversation are the same if each condition that they reach has the same results, whether forced or by itself.

    rendered before           condition 3 was   asked for              is
    nothing forced            false             3 forced to be false   the same
    nothing forced            false             3 forced to be true    rendered
    nothing forced            never reached     3 forced to be true    the same
    3 forced to be false      true              nothing forced         rendered
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import ToolSchema
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.jinja.conditions import Conditions, Outcome

_MAX_CHARACTERS = 20_000_000
"""In all remembered texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendering:
    """The result of one rendering."""

    text: str | None
    """None if the template refused the messages."""
    refusal: str
    forced: Mapping[int, bool]
    outcomes: frozenset[Outcome] = field(default_factory=frozenset)

    def is_same_with(self, forced: Mapping[int, bool]) -> bool:
        """Whether the result would be the same while these conditions are forced."""
        return all(self._decides_alike(number, forced) for number in {*forced, *self.forced})

    def _decides_alike(self, number: int, forced: Mapping[int, bool]) -> bool:
        own = frozenset(value for value in (True, False) if (number, value) in self.outcomes)
        before = frozenset({self.forced[number]}) if number in self.forced else own
        after = frozenset({forced[number]}) if number in forced else own
        return not own or before == after


class RenderingMemory:
    """A template that renders each conversation once. `conditions` are its own, if they are marked."""

    def __init__(self, template: ChatTemplate, conditions: Conditions | None = None) -> None:
        self._template = template
        self._conditions = conditions or Conditions()
        self._known: dict[bytes, list[_Rendering]] = {}
        self._num_characters = 0
        self.num_renderings = 0

    def forget(self) -> None:
        """Forget all renderings."""
        self._known.clear()
        self._num_characters = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation, or recall it; see `ChatTemplate.render`."""
        key = _make_key(messages, tools, add_generation_prompt)
        forced = self._conditions.forced
        known = () if key is None else self._known.get(key, ())
        rendering = next((each for each in known if each.is_same_with(forced)), None)
        if rendering is None:
            rendering = self._render(messages, tools, add_generation_prompt)
            if key is not None:
                self._remember(key, rendering)
        self._conditions.add_outcomes(rendering.outcomes)
        if rendering.text is None:
            raise TemplateError(rendering.refusal)
        return rendering.text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], add_generation_prompt: bool
    ) -> _Rendering:
        self.num_renderings += 1
        before = self._conditions.take_outcomes()
        text, refusal = None, ""
        try:
            text = self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            refusal = str(error)
        outcomes = self._conditions.take_outcomes()
        self._conditions.add_outcomes(before)
        return _Rendering(text=text, refusal=refusal, forced=dict(self._conditions.forced), outcomes=outcomes)

    def _remember(self, key: bytes, rendering: _Rendering) -> None:
        self._num_characters += len(rendering.text or "")
        if self._num_characters > _MAX_CHARACTERS:
            self.forget()
        self._known.setdefault(key, []).append(rendering)


def _make_key(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], add_generation_prompt: bool
) -> bytes | None:
    """The same for the same messages and tools; None for values that cannot be compared in this way."""
    try:
        data = marshal.dumps((list(messages), list[Any](tools), add_generation_prompt), 2)
    except ValueError:
        return None
    return hashlib.blake2b(data, digest_size=16).digest()
