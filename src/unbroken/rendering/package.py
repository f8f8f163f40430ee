"""Renderers of the PyPI package `renderers` as renderers of ours.

The package writes a family's template by hand where `TemplateRenderer` probes it. Its bridges are verified here: one
that does not begin with exactly what was there is refused. It encodes messages' text with the tokenizer as it is, so
text that holds a control token is refused too (I5); text that completes one together with the template's is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message, ToolSchema, check_messages, check_tools, strings_in
from unbroken.rendering.base import (
    TEMPLATE,
    Bridge,
    BridgeOutcome,
    Closing,
    ParsedResponse,
    ParsedToolCall,
    Refusal,
    RefusalReason,
    RenderedPrompt,
    ToolCallStatus,
)
from unbroken.rendering.control import AddedTokens
from unbroken.types import TokenIds, token_ids

_STATUSES = {
    "ok": ToolCallStatus.OK,
    "invalid_json": ToolCallStatus.INVALID_JSON,
    "unclosed_block": ToolCallStatus.UNCLOSED,
    "missing_name": ToolCallStatus.MISSING_NAME,
    "malformed_structure": ToolCallStatus.INVALID_JSON,
}
_REFUSALS = (ValueError, TypeError, KeyError, NotImplementedError)
"""What the package raises for messages that it cannot render."""


class PackageRenderer:
    """Implements `Renderer` with a renderer of the package, e.g. `Qwen3Renderer(tokenizer)`, for the same tokenizer."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self._renderer = renderer
        self._backend = tokenizer.backend_tokenizer
        self._control = AddedTokens.control_of(self._backend)

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

    def parse_response(self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None) -> ParsedResponse:
        """The package's parse in our words; a call without a span of its own gets the whole completion's."""
        parsed = self._renderer.parse_response(
            _listed(completion_ids), prompt_ids=None if prompt_ids is None else _listed(prompt_ids)
        )
        return ParsedResponse(
            content=parsed.content,
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(_parsed_call(call, len(completion_ids)) for call in parsed.tool_calls),
            reasoning_complete=parsed.reasoning_complete is not False,
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
    ) -> BridgeOutcome:
        """The package's bridge if it only appends; its cost grows with the history, as it returns all of it."""
        try:
            check_messages(new_messages)
        except MessagesError as error:
            return Refusal(reason=RefusalReason.BAD_EXTENSION, detail=f"new {error}")
        if any(message["role"] == "assistant" for message in new_messages):
            detail = "an assistant message cannot extend a sampled turn"
            return Refusal(reason=RefusalReason.BAD_EXTENSION, detail=detail)
        if (unsafe := self._unsafe_text(new_messages, tools)) is not None:
            return Refusal(reason=RefusalReason.UNSAFE_TEXT, detail=unsafe)
        before = [*_listed(prompt_ids), *_listed(completion_ids)]
        try:
            rendered = self._renderer.bridge_to_next_turn(
                _listed(prompt_ids), _listed(completion_ids), list(new_messages), tools=list(tools) or None
            )
        except _REFUSALS as error:
            detail = f"the package's renderer refuses these messages: {type(error).__name__}: {error}"
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail=detail)
        if rendered is None:
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail="the package's renderer does not bridge this")
        if list(rendered.token_ids[: len(before)]) != before:
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail="the package's bridge changes the ids before it")
        return Bridge(
            bridge_ids=token_ids(rendered.token_ids[len(before) :]),
            message_indices=_content_indices(rendered, start=len(before)),
            closing=self._closing(prompt_ids, completion_ids),
        )

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool) -> Any:
        check_messages(messages)
        check_tools(tools)
        if (unsafe := self._unsafe_text(messages, tools)) is not None:
            raise TemplateError(f"{unsafe}: the package's renderers cannot encode that as text, TemplateRenderer can")
        try:
            return self._renderer.render(
                list(messages), tools=list(tools) or None, add_generation_prompt=add_generation_prompt
            )
        except _REFUSALS as error:
            raise TemplateError(
                f"{type(self._renderer).__name__} refuses these messages: {type(error).__name__}: {error}"
            ) from None

    def _unsafe_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        for position, message in enumerate(messages):
            if any(map(self._spells_control, strings_in(message))):
                return f"messages[{position}] has a control token in its text"
        for position, tool in enumerate(tools):
            if any(map(self._spells_control, strings_in(tool))):
                return f"tools[{position}] has a control token in its text"
        return None

    def _spells_control(self, text: str) -> bool:
        if self._backend.normalizer is None:
            return self._control.occurs_in(text)
        # A tokenizer that normalises text finds control tokens in other spellings too.
        encoding = self._backend.encode(text, add_special_tokens=False)
        return self._control.occurs_in(text) or not self._control.ids.isdisjoint(encoding.ids)

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


def _parsed_call(call: Any, num_ids: int) -> ParsedToolCall:
    status = _STATUSES.get(str(call.status), ToolCallStatus.INVALID_JSON)
    if status is ToolCallStatus.OK and not isinstance(call.arguments, dict):
        status = ToolCallStatus.INVALID_ARGUMENTS
    span = call.token_span or (0, num_ids)
    if status is not ToolCallStatus.OK:
        return ParsedToolCall(raw=call.raw, status=status, span=span)
    return ParsedToolCall(raw=call.raw, status=status, span=span, name=call.name, arguments=call.arguments)
