"""Renderers of the PyPI package `renderers` as renderers of ours.

The package writes a family's template by hand where `TemplateRenderer` probes it. Its bridges are verified here: one
that does not begin with exactly what was there is refused. It encodes messages' text with the tokenizer as it is (I5),
so text that holds a control token is refused, and text that could complete one is rendered once more with other words
in its place: the control ids must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import numpy as np

from unbroken.errors import MessagesError, TemplateError
from unbroken.integrations.renderers.parsing import convert_parse
from unbroken.integrations.renderers.text_replacement import replace_suspicious_text
from unbroken.messages import Message, ToolSchema, check_messages, check_tools, has_images, iterate_strings
from unbroken.rendering.base import (
    TEMPLATE,
    Bridge,
    BridgeOutcome,
    Closing,
    ParsedResponse,
    Refusal,
    RefusalReason,
    RenderedPrompt,
    ResponseReader,
)
from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.images import load_images
from unbroken.rendering.parsing.buffered import BufferedReader
from unbroken.types import TokenIds, token_ids

_REFUSALS = (ValueError, TypeError, KeyError, NotImplementedError, jinja2.TemplateError)
"""What the package raises for messages that it cannot render."""
_FORGED = "text completes a control token together with the text around it"
_UNKNOWN_TOOL = "unknown_tool"
_REASONING_CLOSING = "</think>"
_TEXT_ONLY = "the package's renderers are given text only. Use renderer='template'"
_WHAT_TO_DO = (
    "the package's renderers cannot encode that as text. Use renderer='template', which can, or take the control token "
    "out of the text (reasoning goes into reasoning_content, calls into tool_calls)"
)


class PackageRenderer:
    """Implements `Renderer` with a renderer of the package, e.g. `Qwen3Renderer(tokenizer)`, for the same tokenizer."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self._renderer = renderer
        self._backend = tokenizer.backend_tokenizer
        self._control = AddedTokens.find_control(self._backend)
        self._control_ids = self._control.ids

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """A whole conversation with the generation prompt; see `Renderer.render`."""
        rendered = self._render(messages, tools, add_generation_prompt=True)
        return RenderedPrompt(
            token_ids=token_ids(rendered.token_ids), message_indices=_content_indices(rendered, start=0)
        )

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        """Like `render`, ids only, with the generation prompt left to the caller."""
        return token_ids(self._render(messages, tools, add_generation_prompt=add_generation_prompt).token_ids)

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """The package's parse in our words; see `package_parsing` for what its parts tell."""
        ids, before = _listed(completion_ids), None if prompt_ids is None else _listed(prompt_ids)
        parsed = self._renderer.parse_response(ids, prompt_ids=before, tools=list(tools) or None)
        if any(str(call.status) == _UNKNOWN_TOOL for call in parsed.tool_calls):
            # Whether there is such a tool is for the environment to say.
            parsed = self._renderer.parse_response(ids, prompt_ids=before)
        return convert_parse(
            parsed,
            ids,
            stop_token_ids=self.get_stop_token_ids(),
            reasoning_closing_id=self._control.get_id(_REASONING_CLOSING),
        )

    def open_response(self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()) -> ResponseReader:
        """A reader that gives everything at the end: the package parses whole completions only."""
        return BufferedReader(
            lambda ids: self.parse_response(np.array(ids, dtype=np.int32), prompt_ids=prompt_ids, tools=tools)
        )

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn."""
        return tuple(self._renderer.get_stop_token_ids())

    def bridge_to_next_turn(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema] = (),
        earlier: Sequence[Message] | None = None,
    ) -> BridgeOutcome:
        """The package's bridge if it only appends; its cost grows with the history, as it returns all of it."""
        try:
            check_messages(new_messages)
        except MessagesError as error:
            return Refusal(reason=RefusalReason.BAD_EXTENSION, detail=f"new {error}")
        if any(has_images(message.get("content")) for message in new_messages):
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail=f"new messages have images: {_TEXT_ONLY}")
        if any(message["role"] == "assistant" for message in new_messages):
            detail = "an assistant message cannot extend a sampled turn"
            return Refusal(reason=RefusalReason.BAD_EXTENSION, detail=detail)
        if (unsafe := self._unsafe_text(new_messages, tools)) is not None:
            return Refusal(reason=RefusalReason.UNSAFE_TEXT, detail=unsafe)
        before = [*_listed(prompt_ids), *_listed(completion_ids)]

        def bridge(messages: Sequence[Any], tools: Sequence[Any]) -> Any:
            return self._renderer.bridge_to_next_turn(
                _listed(prompt_ids), _listed(completion_ids), list(messages), tools=list(tools) or None
            )

        try:
            rendered = bridge(new_messages, tools)
        except _REFUSALS as error:
            detail = f"the package's renderer refuses these messages: {type(error).__name__}: {error}"
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail=detail)
        if rendered is None:
            return self._refusal_for_none(new_messages)
        if list(rendered.token_ids[: len(before)]) != before:
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail="the package's bridge changes the ids before it")
        if self._owes_control_to_text(rendered.token_ids, bridge, new_messages, tools):
            return Refusal(reason=RefusalReason.UNSAFE_TEXT, detail=f"{_FORGED}: {_WHAT_TO_DO}")
        return Bridge(
            bridge_ids=token_ids(rendered.token_ids[len(before) :]),
            message_indices=_content_indices(rendered, start=len(before)),
            closing=self._closing(prompt_ids, completion_ids),
        )

    def _refusal_for_none(self, new_messages: Sequence[Message]) -> Refusal:
        """The package's verdict carries no reason, but one of them can be told."""
        retention = getattr(self._renderer, "effective_thinking_retention", None)
        if retention == "tool_cycle" and any(message["role"] == "user" for message in new_messages):
            detail = "thinking_retention='tool_cycle': the reasoning before a new user message is rendered afresh"
            return Refusal(reason=RefusalReason.REWRITES_HISTORY, detail=detail)
        return Refusal(reason=RefusalReason.UNSUPPORTED, detail="the package's renderer does not bridge this")

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool) -> Any:
        check_messages(messages)
        check_tools(tools)
        load_images(messages, None, no_images_because=_TEXT_ONLY)
        if (unsafe := self._unsafe_text(messages, tools)) is not None:
            raise TemplateError(unsafe)

        def render(messages: Sequence[Any], tools: Sequence[Any]) -> Any:
            return self._renderer.render(
                list(messages), tools=list(tools) or None, add_generation_prompt=add_generation_prompt
            )

        try:
            rendered = render(messages, tools)
        except _REFUSALS as error:
            raise TemplateError(
                f"{type(self._renderer).__name__} refuses these messages: {type(error).__name__}: {error}"
            ) from None
        if self._owes_control_to_text(rendered.token_ids, render, messages, tools):
            raise TemplateError(f"{_FORGED}: {_WHAT_TO_DO}")
        return rendered

    def _unsafe_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        named = [(f"messages[{k}]", message) for k, message in enumerate(messages)]
        for name, value in [*named, *((f"tools[{k}]", tool) for k, tool in enumerate(tools))]:
            if any(map(self._spells_control, iterate_strings(value))):
                return f"{name} has a control token in its text: {_WHAT_TO_DO}"
        return None

    def _owes_control_to_text(
        self,
        ids: Sequence[int],
        render: Callable[[Sequence[Any], Sequence[Any]], Any],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> bool:
        """Whether `ids` have other control ids than the same rendering with harmless text, or that is refused."""
        harmless_messages = replace_suspicious_text(messages, self._may_forge)
        harmless_tools = replace_suspicious_text(tools, self._may_forge)
        if harmless_messages == list(messages) and harmless_tools == list(tools):
            return False
        try:
            rendered = render(harmless_messages, harmless_tools)
        except _REFUSALS:
            return True
        return rendered is None or self._only_control(ids) != self._only_control(rendered.token_ids)

    def _only_control(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._control_ids]

    def _may_forge(self, text: str) -> bool:
        normalizer = self._backend.normalizer
        return self._control.may_overlap(text) or (
            normalizer is not None and self._control.may_overlap(normalizer.normalize_str(text))
        )

    def _spells_control(self, text: str) -> bool:
        if self._backend.normalizer is None:
            return self._control.occurs_in(text)
        # A tokenizer that normalises text finds control tokens in other spellings too.
        encoding = self._backend.encode(text, add_special_tokens=False)
        return self._control.occurs_in(text) or not self._control_ids.isdisjoint(encoding.ids)

    def _closing(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> Closing:
        if len(completion_ids) and int(completion_ids[-1]) in self.get_stop_token_ids():
            return Closing.NONE
        parsed = self.parse_response(completion_ids, prompt_ids=prompt_ids)
        return Closing.TRUNCATED if parsed.reasoning_complete else Closing.REASONING


def _listed(ids: Iterable[int]) -> list[int]:
    return [int(token_id) for token_id in ids]


def _content_indices(rendered: Any, *, start: int) -> TokenIds:
    """The package also attributes headers to messages; ours are the ids that spell a message's own text."""
    indices = np.array(rendered.message_indices[start:], dtype=np.int32)
    is_content = np.array(rendered.is_content[start:], dtype=np.bool_)
    if len(is_content) != len(indices):
        return np.full(len(indices), TEMPLATE, dtype=np.int32)
    return np.where(is_content, indices, TEMPLATE).astype(np.int32)
