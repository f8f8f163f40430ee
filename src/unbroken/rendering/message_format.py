"""The message format that a template wants, found by probing it, and the conversion of messages to it.

Templates differ in three things: content as text or as a list of parts, call arguments as an object or as a JSON
string, and the key of the reasoning. Content with images is always a list, in which the template sees only the places
of images. Reasoning under any of its names is also passed under the template's. Everything else in a message is passed
on unchanged.

The texts around reasoning are found too: reasoning that was cut is closed with them (I7).
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
    ToolSchema,
    get_reasoning,
    get_text,
    has_images,
    make_call,
)
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.tokenizer import AddedTokens

ProbeMessage = dict[str, Any]

PROBE_USER, PROBE_CONTENT, PROBE_REASONING, PROBE_ARGUMENT = "Xq7User", "Xq7Content", "Xq7Reasoning", "Xq7Argument"
PROBE_NAMES = ("probe_one", "probe_two")
_USUAL_MARKUP = ("<think>", "</think>")

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
        out["content"] = self._convert_content(position, message.get("content"))
        if (reasoning := get_reasoning(message)) is not None:
            # As transformers does since 5.23, which fills in these two names only.
            key = self.reasoning_key or "reasoning_content"
            out = {key: reasoning, "thinking": reasoning, **out, "reasoning_content": reasoning}
        if out.get("tool_calls"):
            out["tool_calls"] = [self._convert_call(call) for call in out["tool_calls"]]
        return out

    def _convert_content(self, position: int, content: Any) -> Any:
        if isinstance(content, list):
            _check_parts(position, content)
        if has_images(content):
            return [
                {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"}
                for part in content
            ]
        text = get_text(content)
        return [{"type": "text", "text": text}] if self.wants_parts else text

    def _convert_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        if self.arguments is ArgumentFormat.STRING and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        if self.arguments is ArgumentFormat.OBJECT and isinstance(arguments, str):
            function["arguments"] = parse_arguments(arguments)
        return {**call, "function": function}


def _check_parts(position: int, parts: Sequence[Mapping[str, Any]]) -> None:
    for part in parts:
        if part["type"] not in ("text", *IMAGE_TYPES):
            raise MessagesError(
                f"messages[{position}].content has a part of type {part['type']!r}: this renderer takes text and "
                'images only, {"type": "text", "text": ...} and {"type": "image", "image": ...}'
            )


def find_message_format(template: ChatTemplate) -> MessageFormat:
    """Find the message format of a template by probing it with sentinel texts."""
    wants_parts = not _renders_content(template, _make_turn(PROBE_CONTENT)) and _renders_content(
        template, _make_turn(PROBE_CONTENT), parts=True
    )
    arguments = _find_argument_format(template, wants_parts)
    keys = (key for key in REASONING_KEYS if _renders_reasoning(template, key, wants_parts, arguments))
    return MessageFormat(wants_parts=wants_parts, arguments=arguments, reasoning_key=next(keys, None))


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
        message["tool_calls"] = [make_call("callprob1", PROBE_NAMES[0], arguments)]
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


def get_texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a converted message's content."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def says_something(turn: Mapping[str, Any]) -> bool:
    """Whether a converted message has a call, reasoning, or content that is more than white space."""
    return bool(turn.get("tool_calls") or get_reasoning(turn) or any(map(str.strip, get_texts(turn))))


def parse_arguments(arguments: str) -> Any:
    """Parse a call's arguments from JSON; text that is not JSON is returned as it is."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelimiters:
    """The texts around reasoning, e.g. `<think>` and `</think>`."""

    opening: str
    closing: str
    close_text: str
    """All text between reasoning and answer, e.g. `\\n</think>\\n\\n`."""


def find_reasoning_delimiters(
    template: ChatTemplate, message_format: MessageFormat, control: AddedTokens
) -> ReasoningDelimiters | None:
    """Find the control token that opens reasoning and the one that closes it; None unless both do only that.

    A channel marker that opens every kind of text, such as gpt-oss's, does not delimit reasoning.
    """
    text = _render_reasoning(template, message_format)
    reasoning, content = text.find(PROBE_REASONING), text.find(PROBE_CONTENT)
    if not 0 <= reasoning < content:
        return None
    end = reasoning + len(PROBE_REASONING)
    opening = list(control.find(text, 0, reasoning))
    closing = list(control.find(text, end, content))
    if not opening or len(closing) != 1 or text[opening[-1].stop : reasoning].strip():
        return None
    tokens = [match.token for match in control.find(text)]
    if tokens.count(opening[-1].token) != 1 or tokens.count(closing[0].token) != 1:
        return None
    return ReasoningDelimiters(opening=opening[-1].token, closing=closing[0].token, close_text=text[end:content])


def find_reasoning_markup(
    template: ChatTemplate, message_format: MessageFormat, control: AddedTokens
) -> tuple[str, str]:
    r"""Find the texts that open and close reasoning, of any number of tokens: `<|channel>thought` and `<channel|>`.

    `<think>` and `</think>` if the template does not render reasoning, or opens other texts in the same way.
    """
    text = _render_reasoning(template, message_format)
    reasoning = text.find(PROBE_REASONING)
    before = list(control.find(text, 0, max(reasoning, 0)))
    after = next(control.find(text, reasoning + len(PROBE_REASONING)), None) if reasoning >= 0 else None
    if not before or after is None:
        return _USUAL_MARKUP
    opening = text[before[-1].start : reasoning].strip()
    return (opening, after.token) if text.count(opening) == 1 else _USUAL_MARKUP


def _render_reasoning(template: ChatTemplate, message_format: MessageFormat) -> str:
    """Render a turn with reasoning and content, from the user's text on; empty if the template cannot."""
    if message_format.reasoning_key is None:
        return ""
    messages: list[Message] = [
        {"role": "user", "content": PROBE_USER},
        {"role": "assistant", "content": PROBE_CONTENT, "reasoning_content": PROBE_REASONING},
    ]
    try:
        text = template.render(message_format.convert(messages), add_generation_prompt=False)
    except TemplateError:
        return ""
    return text[max(text.rfind(PROBE_USER), 0) :]
