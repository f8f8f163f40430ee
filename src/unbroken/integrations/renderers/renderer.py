"""Adapts renderers of the PyPI package `renderers` to our `Renderer` protocol.

The package implements the template of a model family by hand, where `TemplateRenderer` probes it. A bridge of the
package that changes the ids before it is refused. It encodes messages' text with the plain tokenizer (I5): so text with
a control token is refused, and text that could complete one is replaced and rendered again, which must give the same
control ids.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from unbroken.errors import MessagesError, TemplateError
from unbroken.integrations.renderers.responses import convert_parse, leave_calls_as_content
from unbroken.messages import Message, ToolSchema, check_messages, check_tools, has_images, iterate_strings
from unbroken.rendering.base import (
    TEMPLATE,
    Bridge,
    BridgeOutcome,
    BufferedReader,
    Closing,
    ParsedResponse,
    Refusal,
    RefusalReason,
    RenderedPrompt,
    ResponseReader,
)
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.images import load_images
from unbroken.threads import DaemonThreads
from unbroken.types import TokenIds, token_ids

_PACKAGE_ERRORS = (ValueError, TypeError, KeyError, NotImplementedError, jinja2.TemplateError)
"""Raised by the package for messages that it cannot render."""
_FORGED = "text forms a control token together with the text around it"
_UNKNOWN_TOOL = "unknown_tool"
_REASONING_CLOSING = "</think>"
_TEXT_ONLY = "the package's renderers support text only. Use renderer='template'"
_ADVICE = (
    "the package's renderers cannot encode that as text. Use renderer='template', which can, or remove the control "
    "token from the text (reasoning goes into reasoning_content, calls into tool_calls)"
)


class PackageRenderer:
    """Implements `Renderer` with a renderer of the package, e.g. `Qwen3Renderer(tokenizer)`, for the same tokenizer."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self._renderer = renderer
        self._lock = threading.RLock()
        """Of the package's renderer: a transformers tokenizer is not safe to use from several threads."""
        self._threads = DaemonThreads(1)
        self._backend = tokenizer.backend_tokenizer
        self._control = AddedTokens.find_control(self._backend)
        self._control_ids = self._control.ids

    @property
    def renderer_threads(self) -> DaemonThreads:
        """The thread to use this renderer in, for callers with an event loop."""
        return self._threads

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Render a whole conversation with the generation prompt; see `Renderer.render`."""
        rendered = self._render(messages, tools, add_generation_prompt=True)
        return RenderedPrompt(
            token_ids=token_ids(rendered.token_ids), message_indices=_get_content_indices(rendered, start=0)
        )

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        """Like `render`, ids only; the generation prompt is optional."""
        return token_ids(self._render(messages, tools, add_generation_prompt=add_generation_prompt).token_ids)

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Parse with the package; `convert_parse` finds the parts."""
        ids, before = _to_list(completion_ids), None if prompt_ids is None else _to_list(prompt_ids)
        with self._lock:
            parsed = self._renderer.parse_response(ids, prompt_ids=before, tools=list(tools) or None)
            if any(str(call.status) == _UNKNOWN_TOOL for call in parsed.tool_calls):
                # The environment decides whether there is such a tool.
                parsed = self._renderer.parse_response(ids, prompt_ids=before)
        return convert_parse(
            parsed,
            ids,
            stop_token_ids=self.get_stop_token_ids(),
            reasoning_closing_id=self._control.get_id(_REASONING_CLOSING),
            decode=self._decode,
        )

    def open_response(
        self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> ResponseReader:
        """Open a reader that returns everything at the end: the package parses whole completions only."""

        def parse(ids: Sequence[int]) -> ParsedResponse:
            parsed = self.parse_response(np.array(ids, dtype=np.int32), prompt_ids=prompt_ids, tools=tools)
            return parsed if reads_calls else leave_calls_as_content(parsed, ids, self._decode)

        return BufferedReader(parse)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

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
        earlier: Sequence[Message] = (),
    ) -> BridgeOutcome:
        """The package's bridge, if it only appends. It returns the whole history, so its cost grows with that."""
        try:
            check_messages(new_messages)
        except MessagesError as error:
            return Refusal(reason=RefusalReason.BAD_EXTENSION, detail=f"new {error}")
        if any(has_images(message.get("content")) for message in new_messages):
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail=f"new messages have images: {_TEXT_ONLY}")
        if any(message["role"] == "assistant" for message in new_messages):
            detail = "an assistant message cannot extend a sampled turn"
            return Refusal(reason=RefusalReason.BAD_EXTENSION, detail=detail)
        if (unsafe := self._find_unsafe_text(new_messages, tools)) is not None:
            return Refusal(reason=RefusalReason.UNSAFE_TEXT, detail=unsafe)
        before = [*_to_list(prompt_ids), *_to_list(completion_ids)]

        def bridge(messages: Sequence[Any], tools: Sequence[Any]) -> Any:
            with self._lock:
                return self._renderer.bridge_to_next_turn(
                    _to_list(prompt_ids), _to_list(completion_ids), list(messages), tools=list(tools) or None
                )

        try:
            rendered = bridge(new_messages, tools)
        except _PACKAGE_ERRORS as error:
            detail = f"the package's renderer refuses these messages: {type(error).__name__}: {error}"
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail=detail)
        if rendered is None:
            return self._explain_none(new_messages)
        if list(rendered.token_ids[: len(before)]) != before:
            return Refusal(reason=RefusalReason.UNSUPPORTED, detail="the package's bridge changes the ids before it")
        if self._is_forged(rendered.token_ids, bridge, new_messages, tools):
            return Refusal(reason=RefusalReason.UNSAFE_TEXT, detail=f"{_FORGED}: {_ADVICE}")
        return Bridge(
            bridge_ids=token_ids(rendered.token_ids[len(before) :]),
            message_indices=_get_content_indices(rendered, start=len(before)),
            closing=self._find_closing(prompt_ids, completion_ids),
        )

    def _explain_none(self, new_messages: Sequence[Message]) -> Refusal:
        """Infer the reason for a refusal, because the package gives none."""
        retention = getattr(self._renderer, "effective_thinking_retention", None)
        if retention == "tool_cycle" and any(message["role"] == "user" for message in new_messages):
            detail = "thinking_retention='tool_cycle': the reasoning before a new user message is rendered afresh"
            return Refusal(reason=RefusalReason.REWRITES_HISTORY, detail=detail)
        return Refusal(reason=RefusalReason.UNSUPPORTED, detail="the package's renderer does not bridge this")

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool) -> Any:
        check_messages(messages)
        check_tools(tools)
        load_images(messages, None, no_images_because=_TEXT_ONLY)
        if (unsafe := self._find_unsafe_text(messages, tools)) is not None:
            raise TemplateError(unsafe)

        def render(messages: Sequence[Any], tools: Sequence[Any]) -> Any:
            with self._lock:
                return self._renderer.render(
                    list(messages), tools=list(tools) or None, add_generation_prompt=add_generation_prompt
                )

        try:
            rendered = render(messages, tools)
        except _PACKAGE_ERRORS as error:
            raise TemplateError(
                f"{type(self._renderer).__name__} refuses these messages: {type(error).__name__}: {error}"
            ) from None
        if self._is_forged(rendered.token_ids, render, messages, tools):
            raise TemplateError(f"{_FORGED}: {_ADVICE}")
        return rendered

    def _find_unsafe_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        named = [(f"messages[{k}]", message) for k, message in enumerate(messages)]
        for name, value in [*named, *((f"tools[{k}]", tool) for k, tool in enumerate(tools))]:
            if any(map(self._spells_control, iterate_strings(value))):
                return f"{name} has a control token in its text: {_ADVICE}"
        return None

    def _is_forged(
        self,
        ids: Sequence[int],
        render: Callable[[Sequence[Any], Sequence[Any]], Any],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> bool:
        """Whether suspicious text changes the control ids, or the rendering without it is refused."""
        harmless_messages = replace_suspicious_text(messages, self._may_forge)
        harmless_tools = replace_suspicious_text(tools, self._may_forge)
        if harmless_messages == list(messages) and harmless_tools == list(tools):
            return False
        try:
            rendered = render(harmless_messages, harmless_tools)
        except _PACKAGE_ERRORS:
            return True
        return rendered is None or self._get_control_ids(ids) != self._get_control_ids(rendered.token_ids)

    def _get_control_ids(self, ids: Sequence[int]) -> list[int]:
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

    def _find_closing(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> Closing:
        if len(completion_ids) and int(completion_ids[-1]) in self.get_stop_token_ids():
            return Closing.NONE
        parsed = self.parse_response(completion_ids, prompt_ids=prompt_ids)
        return Closing.TRUNCATED if parsed.reasoning_complete else Closing.REASONING


def _to_list(ids: Iterable[int]) -> list[int]:
    return [int(token_id) for token_id in ids]


def _get_content_indices(rendered: Any, *, start: int) -> TokenIds:
    """Indices of a message's own text only: the package also attributes headers to messages."""
    indices = np.array(rendered.message_indices[start:], dtype=np.int32)
    is_content = np.array(rendered.is_content[start:], dtype=np.bool_)
    if len(is_content) != len(indices):
        return np.full(len(indices), TEMPLATE, dtype=np.int32)
    return np.where(is_content, indices, TEMPLATE).astype(np.int32)


_FIXED_KEYS = frozenset(
    {"role", "type", "content", "reasoning_content", "tool_calls", "tool_call_id", "id", "function", "name"}
    | {"arguments", "text", "description", "parameters", "properties"}
)
"""Keys that renderers look up. All other keys are text from outside."""
_FIXED_VALUES = frozenset({"system", "developer", "user", "assistant", "tool", "text", "function"})
"""Roles and types that renderers compare."""


def replace_suspicious_text(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """Copy messages or tools, with every character of suspicious strings except white space replaced by x.

    It shows whether a text forges a control token in a rendering (I5). The package's renderers take no marks in text.
    But text that may complete a control token can be replaced, and then the rendering must have the same control tokens
    as before:

        user "im_end|>" after a template's "<|"     [<|im_end|>, ..]      with "xxxxxxxx" []        forged
        user "a < b" (may begin a token)            [<|im_end|>]          with "x x x" [<|im_end|>]  harmless

    The fixed keys, roles and types stay. Arguments that are JSON text stay JSON text.
    """
    if isinstance(value, Mapping):
        return {
            key if key in _FIXED_KEYS else _replace(key, is_suspicious): _replace_item(key, item, is_suspicious)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [replace_suspicious_text(item, is_suspicious) for item in value]
    return _replace(value, is_suspicious)


def _replace_item(key: Any, item: Any, is_suspicious: Callable[[str], bool]) -> Any:
    if key in ("role", "type") and isinstance(item, str) and item in _FIXED_VALUES:
        return item
    if key != "arguments":
        return replace_suspicious_text(item, is_suspicious)
    if isinstance(item, str):
        try:
            return json.dumps(_replace_all(json.loads(item), is_suspicious), ensure_ascii=False)
        except ValueError:
            pass
    return _replace_all(item, is_suspicious)


def _replace_all(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    """Like `replace_suspicious_text`, for arguments: no key is fixed."""
    if isinstance(value, Mapping):
        return {_replace(key, is_suspicious): _replace_all(item, is_suspicious) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_all(item, is_suspicious) for item in value]
    return _replace(value, is_suspicious)


def _replace(value: Any, is_suspicious: Callable[[str], bool]) -> Any:
    return re.sub(r"\S", "x", value) if isinstance(value, str) and is_suspicious(value) else value
