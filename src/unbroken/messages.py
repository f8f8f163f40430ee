"""Messages and tool schemas in the OpenAI form: what datasets, agents and chat templates speak.

They are plain dictionaries because that is what all three exchange; `check_messages` guards the border. A tool call's
arguments are a dictionary (the decoded JSON object), or the string the model wrote where a caller prefers to keep it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Required, TypeAlias, TypedDict

from unbroken.errors import MessagesError, ToolDefinitionError


class TextPart(TypedDict):
    """A piece of text inside a message's content."""

    type: Literal["text"]
    text: str


IMAGE_TYPES = ("image", "image_url", "image_pil")
"""Types of the parts that are images."""


class ImagePart(TypedDict, total=False):
    """An image inside a message's content, under its type or under `image`, in any form that `ImageLoader` takes."""

    type: Required[Literal["image", "image_url", "image_pil"]]
    image: Any
    image_url: Any
    """A URL, or `{"url": ...}`."""
    image_pil: Any


ContentPart: TypeAlias = TextPart | ImagePart
Content: TypeAlias = str | list[ContentPart] | None


class FunctionCall(TypedDict):
    """The function a tool call names, and its arguments."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """One call an assistant message makes. `id` is unique in the conversation."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One message. `tool_call_id` and `name` say which call a tool message answers."""

    role: Required[str]
    content: Required[Content]
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str


class FunctionSchema(TypedDict, total=False):
    """Name, description and JSON schema of the parameters of one function."""

    name: Required[str]
    description: str
    parameters: dict[str, Any]


class ToolSchema(TypedDict):
    """A tool as chat templates and APIs expect it."""

    type: Literal["function"]
    function: FunctionSchema


KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles of the OpenAI form. A template may know others: what it leaves out of those is an error."""


def check_messages(messages: Sequence[Message]) -> None:
    """Check what every template relies on, before one of them is rendered.

    Raises:
        MessagesError: there are no messages, one is not a mapping with a role, its content is neither text, parts nor
            None, a text part has no text, an image part no image, a name or id is no text, a tool call has no name or
            its arguments are no JSON object, a value is nested too deeply, or a string cannot be encoded. The message
            names the place, the rule and the value.
    """
    if not isinstance(messages, (list, tuple)):
        raise MessagesError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise MessagesError("messages must hold at least one message, got none")
    for position, message in enumerate(messages):
        _check_message(f"messages[{position}]", message)


def check_conversation(messages: Sequence[Message]) -> None:
    """Like `check_messages`, for a conversation from its beginning: each tool result answers a call before it.

    Raises:
        MessagesError: as there, or a tool message names a call that there was not, or comes before any turn.
    """
    check_messages(messages)
    ids: set[str] = set()
    has_turn = False
    for position, message in enumerate(messages):
        call_id = message.get("tool_call_id")
        if message["role"] == "assistant":
            has_turn = True
            ids |= {str(call["id"]) for call in message.get("tool_calls") or () if call.get("id") is not None}
        elif message["role"] == "tool" and not has_turn:
            raise MessagesError(f"messages[{position}].role must not be 'tool' before an assistant message")
        elif message["role"] == "tool" and call_id is not None and call_id not in ids:
            raise MessagesError(
                f"messages[{position}].tool_call_id must be the id of a call before it, got {call_id!r}, "
                f"not one of {sorted(ids)[:20]}"
            )


def check_tools(tools: Sequence[ToolSchema]) -> None:
    """Check that tool schemas can be handed to a template.

    Raises:
        ToolDefinitionError: they are no list of mappings, one is no JSON, or a string in one cannot be encoded.
    """
    if not isinstance(tools, (list, tuple)):
        raise ToolDefinitionError(f"tools must be a list of tool schemas, got {type(tools).__name__}")
    for position, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ToolDefinitionError(f"tools[{position}] must be a mapping, got {type(tool).__name__}")
        place = f"tools[{position}]"
        if (rule := _broken_json(place, tool) or _broken_text(place, tool)) is not None:
            raise ToolDefinitionError(rule)


def iterate_strings(value: Any) -> Iterator[str]:
    """All strings of a JSON-like value, keys included."""
    for _, text in _placed_strings("", value):
        yield text


def _check_message(place: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise MessagesError(f"{place} must be a mapping with a role, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessagesError(f"{place}.role must be a non-empty string, got {role!r}")
    content = message.get("content")
    if not (content is None or isinstance(content, (str, list))):
        raise MessagesError(f"{place}.content must be text, parts or None, got {type(content).__name__}")
    for k, part in enumerate(content if isinstance(content, list) else ()):
        if not (isinstance(part, Mapping) and isinstance(part.get("type"), str)):
            raise MessagesError(f"{place}.content[{k}] must be a part with a type, got {part!r}")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise MessagesError(f"{place}.content[{k}] must have a text, got {part!r}")
        if part["type"] in IMAGE_TYPES and get_image_source(part) is None:
            raise MessagesError(
                f"{place}.content[{k}] must have its image under {part['type']!r}, got {sorted(map(str, part))}"
            )
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not (message.get(key) is None or isinstance(message[key], str)):
            raise MessagesError(f"{place}.{key} must be text, got {message[key]!r}")
    _check_calls(place, message.get("tool_calls"))
    if (rule := _broken_text(place, message)) is not None:
        raise MessagesError(rule)


def _check_calls(place: str, calls: Any) -> None:
    if not (calls is None or isinstance(calls, (list, tuple))):
        raise MessagesError(f"{place}.tool_calls must be a list of calls, got {calls!r}")
    for k, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]):
            raise MessagesError(f"{place}.tool_calls[{k}] must have a function with a name, got {call!r}")
        if not (call.get("id") is None or isinstance(call["id"], str)):
            raise MessagesError(f"{place}.tool_calls[{k}].id must be text, got {call['id']!r}")
        if "arguments" in function:
            _check_arguments(f"{place}.tool_calls[{k}].function.arguments", function["arguments"])


def _check_arguments(place: str, arguments: Any) -> None:
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except (ValueError, RecursionError):
            decoded = None
    if not isinstance(decoded, Mapping):
        raise MessagesError(f"{place} must be a JSON object or the text of one, got {_shown(arguments)}")
    if (rule := _broken_json(place, arguments)) is not None:
        raise MessagesError(rule)


def _broken_json(place: str, value: Any) -> str | None:
    """Which rule of JSON a value breaks; None if it is JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"{place} must be JSON, got {_shown(value)}: {error}"
    except RecursionError:
        return f"{place} must be JSON that is not nested so deeply, got a {type(value).__name__}"
    return None


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}.. ({len(shown)} characters)"


def _broken_text(place: str, value: Any) -> str | None:
    """Which rule the first string breaks that is no Unicode text, e.g. half of a surrogate pair; None if all are."""
    try:
        for inner, text in _placed_strings(place, value):
            if (position := _broken_at(text)) is not None:
                return f"{inner} must be text that UTF-8 can encode, got {text[position]!r} at character {position}"
    except RecursionError:
        return f"{place} must not be nested so deeply"
    return None


def _broken_at(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _placed_strings(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _placed_strings(f"a key of {place}", key)
            yield from _placed_strings(f"{place}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from _placed_strings(f"{place}[{k}]", item)


def get_image_source(part: Mapping[str, Any]) -> Any:
    """What an image part holds as its image; None if it holds none."""
    source = part.get(part["type"], part.get("image"))
    return source.get("url") if isinstance(source, Mapping) else source


def has_images(content: Any) -> bool:
    """Whether a message's content has image parts."""
    return isinstance(content, list) and any(part["type"] in IMAGE_TYPES for part in content)


def get_text(content: Content) -> str:
    """The text of a message's content, with its parts joined; images contribute nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
