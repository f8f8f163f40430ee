"""The message format that a template wants, found by probing it, and the conversion of messages to it.

Templates differ in three things: content as text or as a list of parts, call arguments as an object or as a JSON
string, and the key of the reasoning. Content with images is always a list, in which the template sees only the places
of images. Reasoning under any of its names is also passed under the template's. Everything else in a message is passed
on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import (
    IMAGE_TYPES,
    REASONING_KEYS,
    Message,
    ToolCall,
    ToolSchema,
    get_reasoning,
    get_text,
    has_images,
)
from unbroken.rendering.jinja.chat_template import ChatTemplate

ProbeMessage = dict[str, Any]

PROBE_USER, PROBE_CONTENT, PROBE_REASONING, PROBE_ARGUMENT = "Xq7User", "Xq7Content", "Xq7Reasoning", "Xq7Argument"
PROBE_NAMES = ("probe_one", "probe_two")

PROBE_TOOLS: tuple[ToolSchema, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "a value"}}},
        },
    }
    for name in PROBE_NAMES
)


class ArgumentFormat(StrEnum):
    """The form in which the template reads a call's arguments."""

    EITHER = "either"
    """An object is written as JSON, a string as it is."""
    OBJECT = "object"
    STRING = "string"
    IGNORED = "ignored"
    """Calls are not rendered: the model writes them in its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """The message format that a template wants."""

    wants_parts: bool
    """Content as `[{"type": "text", "text": ...}]`."""
    arguments: ArgumentFormat
    reasoning_key: str | None
    """None if the template does not render reasoning."""

    @property
    def renders_calls(self) -> bool:
        """Whether the template renders tool calls."""
        return self.arguments is not ArgumentFormat.IGNORED

    def convert(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Copy messages in the template's format, without keys that are None, as transformers does since 5.23.

        Raises:
            MessagesError: a message has parts other than text and images.
        """
        return [self._convert_message(position, message) for position, message in enumerate(messages)]

    def _convert_message(self, position: int, message: Mapping[str, Any]) -> dict[str, Any]:
        out = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(position, content)
        if has_images(content):
            out["content"] = [_convert_part(part) for part in content or ()]
        else:
            text = get_text(content)
            out["content"] = [{"type": "text", "text": text}] if self.wants_parts else text
        if (reasoning := get_reasoning(message)) is not None:
            # As transformers does since 5.23, which fills in these two names only.
            key = self.reasoning_key or "reasoning_content"
            out = {key: reasoning, "thinking": reasoning, **out, "reasoning_content": reasoning}
        if out.get("tool_calls"):
            out["tool_calls"] = [self._convert_call(call) for call in out["tool_calls"]]
        return out

    def _convert_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        if self.arguments is ArgumentFormat.STRING and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        if self.arguments is ArgumentFormat.OBJECT and isinstance(arguments, str):
            function["arguments"] = _parse_or_keep(arguments)
        return {**call, "function": function}


def _check_parts(position: int, parts: Sequence[Mapping[str, Any]]) -> None:
    for part in parts:
        if part["type"] not in ("text", *IMAGE_TYPES):
            raise MessagesError(
                f"messages[{position}].content has a part of type {part['type']!r}: this renderer takes text and "
                'images only, {"type": "text", "text": ...} and {"type": "image", "image": ...}'
            )


def _convert_part(part: Mapping[str, Any]) -> dict[str, str]:
    return {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"}


def find_message_format(template: ChatTemplate) -> MessageFormat:
    """Find the message format of a template by probing it with sentinel texts."""
    wants_parts = not _renders_content(template, _make_turn(PROBE_CONTENT)) and _renders_content(
        template, _make_turn(PROBE_CONTENT), parts=True
    )
    arguments = _find_argument_format(template, wants_parts)
    keys = (key for key in REASONING_KEYS if _renders_reasoning(template, key, wants_parts, arguments))
    return MessageFormat(wants_parts=wants_parts, arguments=arguments, reasoning_key=next(keys, None))


def probe_call(name: str, call_id: str, arguments: dict[str, Any] | str) -> ToolCall:
    """Build a tool call for a probe."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _find_argument_format(template: ChatTemplate, wants_parts: bool) -> ArgumentFormat:
    as_object = _render_probe(template, _make_turn("", {"value": PROBE_ARGUMENT, "flag": True}), wants_parts)
    as_string = _render_probe(template, _make_turn("", json.dumps({"value": PROBE_ARGUMENT})), wants_parts)
    # A template that prints the object itself writes Python, not JSON: it was made for strings.
    takes_object = PROBE_ARGUMENT in as_object and f"'value': '{PROBE_ARGUMENT}'" not in as_object
    takes_string = json.dumps({"value": PROBE_ARGUMENT}) in as_string
    if takes_object:
        return ArgumentFormat.EITHER if takes_string else ArgumentFormat.OBJECT
    return ArgumentFormat.STRING if takes_string else ArgumentFormat.IGNORED


def _renders_reasoning(template: ChatTemplate, key: str, wants_parts: bool, arguments: ArgumentFormat) -> bool:
    value: Any = json.dumps({"value": "x"}) if arguments is ArgumentFormat.STRING else {"value": "x"}
    turns = [_make_turn(PROBE_CONTENT)]
    if arguments is not ArgumentFormat.IGNORED:
        turns.append(_make_turn("", value))
    return any(
        PROBE_REASONING in _render_probe(template, {**turn, key: PROBE_REASONING}, wants_parts) for turn in turns
    )


def _make_turn(content: str, arguments: Any = None) -> ProbeMessage:
    message: ProbeMessage = {"role": "assistant", "content": content}
    if arguments is not None:
        message["tool_calls"] = [probe_call(PROBE_NAMES[0], "callprob1", arguments)]
    return message


def _renders_content(template: ChatTemplate, turn: ProbeMessage, *, parts: bool = False) -> bool:
    text = _render_probe(template, turn, parts)
    return PROBE_CONTENT in text and PROBE_USER in text and f"'{PROBE_CONTENT}'" not in text


def _render_probe(template: ChatTemplate, turn: ProbeMessage, parts: bool) -> str:
    """Render a user message and `turn`; empty if the template refuses it."""
    messages = [{"role": "user", "content": PROBE_USER}, turn]
    if parts:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    try:
        return template.render(messages, tools=PROBE_TOOLS, add_generation_prompt=False)
    except TemplateError:
        return ""


def _parse_or_keep(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
