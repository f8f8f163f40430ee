"""Messages and tool schemas in the OpenAI form, which datasets, agents and chat templates share.

They are plain dictionaries, checked by `check_messages` on entry. A tool call's arguments are the decoded JSON object,
or the string that the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Required, TypeAlias, TypedDict, TypeVar

from unbroken.errors import MessagesError, ToolDefinitionError

T = TypeVar("T")


class TextPart(TypedDict):
    """A piece of text inside a message's content."""

    type: Literal["text"]
    text: str


IMAGE_TYPES = ("image", "image_url", "image_pil")
_IMAGE_KEYS = ("url", "bytes", "path")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The names that a message's reasoning may have. Of several the first counts, as in transformers since 5.23."""


class ImagePart(TypedDict, total=False):
    """An image inside a message's content, in a form that `ImageLoader` takes, under its type or under `image`."""

    type: Required[Literal["image", "image_url", "image_pil"]]
    image: Any
    image_url: Any
    """A URL, or `{"url": ...}`."""
    image_pil: Any


ContentPart: TypeAlias = TextPart | ImagePart
Content: TypeAlias = str | list[ContentPart] | None


class FunctionCall(TypedDict):
    """The name and the arguments of a called function."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """One tool call of an assistant message. `id` is unique in the conversation."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def make_call(call_id: str, name: str, arguments: Mapping[str, Any] | str) -> ToolCall:
    """Make a tool call; `arguments` are an object, or the text of one in JSON."""
    given = arguments if isinstance(arguments, str) else dict(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


class Message(TypedDict, total=False):
    """One message. In a tool message, `tool_call_id` and `name` say which call it answers.

    Reasoning may also come under the other names of `REASONING_KEYS`.
    """

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
    """A tool in the form that chat templates and APIs expect."""

    type: Literal["function"]
    function: FunctionSchema


_JSON = json.JSONEncoder(allow_nan=False)

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles of the OpenAI form. A template may support others; it is an error if it leaves out a message of one."""


def check_messages(messages: Sequence[Message], *, num_checked: int = 0) -> None:
    """Check the structure of messages: the rules that chat templates rely on. The first `num_checked` were checked.

    Raises:
        MessagesError: there are no messages, one is malformed (its role, content, parts, names, ids or calls),
            is nested too deeply, or has a string that UTF-8 cannot encode.
    """
    if not isinstance(messages, (list, tuple)):
        raise MessagesError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise MessagesError("messages must hold at least one message, got none")
    for position in range(num_checked, len(messages)):
        _check_message(f"messages[{position}]", messages[position])


def check_conversation(messages: Sequence[Message], *, num_checked: int = 0) -> None:
    """Check a whole conversation: as `check_messages`, and each tool message must answer an earlier call."""
    check_messages(messages, num_checked=num_checked)
    if all(messages[position]["role"] != "tool" for position in range(num_checked, len(messages))):
        return
    ids: set[str] = set()
    has_turn = False
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            has_turn = True
            ids |= {str(call["id"]) for call in message.get("tool_calls") or () if call.get("id") is not None}
        if position < num_checked or message["role"] != "tool":
            continue
        if not has_turn:
            raise MessagesError(f"messages[{position}].role must not be 'tool' before an assistant message")
        call_id = message.get("tool_call_id")
        if call_id is not None and call_id not in ids:
            raise MessagesError(
                f"messages[{position}].tool_call_id must be the id of an earlier call, got {call_id!r}, "
                f"not one of {sorted(ids)[:20]}"
            )


def check_tools(tools: Sequence[ToolSchema]) -> None:
    """Raise `ToolDefinitionError` unless the tool schemas are a list of JSON objects that UTF-8 can encode."""
    if not isinstance(tools, (list, tuple)):
        raise ToolDefinitionError(f"tools must be a list of tool schemas, got {type(tools).__name__}")
    for position, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ToolDefinitionError(f"tools[{position}] must be a mapping, got {type(tool).__name__}")
        place = f"tools[{position}]"
        if (problem := _find_json_problem(place, tool) or _find_text_problem(place, tool)) is not None:
            raise ToolDefinitionError(problem)


def iterate_strings(value: Any) -> Iterator[str]:
    """Iterate over all strings of a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from iterate_strings(key)
            yield from iterate_strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate_strings(item)


def _check_message(place: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise MessagesError(f"{place} must be a mapping with a role, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessagesError(f"{place}.role must be a non-empty string, got {role!r}")
    _check_content(f"{place}.content", message.get("content"))
    for key in ("name", "tool_call_id", *REASONING_KEYS):
        if not (message.get(key) is None or isinstance(message[key], str)):
            raise MessagesError(f"{place}.{key} must be text, got {message[key]!r}")
    _check_calls(place, message.get("tool_calls"))
    if (problem := _find_text_problem(place, message)) is not None:
        raise MessagesError(problem)


def _check_content(place: str, content: Any) -> None:
    if not (content is None or isinstance(content, (str, list))):
        raise MessagesError(f"{place} must be text, parts or None, got {type(content).__name__}")
    for k, part in enumerate(content if isinstance(content, list) else ()):
        if not (isinstance(part, Mapping) and isinstance(part.get("type"), str)):
            raise MessagesError(f"{place}[{k}] must be a part with a type, got {part!r}")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise MessagesError(f"{place}[{k}] must have a text, got {part!r}")
        if part["type"] in IMAGE_TYPES and get_image_source(part) is None:
            raise MessagesError(
                f"{place}[{k}] must have its image under {part['type']!r}, got {sorted(map(str, part))}"
            )


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
        raise MessagesError(f"{place} must be a JSON object or the text of one, got {_format_value(arguments)}")
    if (problem := _find_json_problem(place, arguments)) is not None:
        raise MessagesError(problem)


def _find_json_problem(place: str, value: Any) -> str | None:
    try:
        _JSON.encode(value)
    except (TypeError, ValueError) as error:
        return f"{place} must be JSON, got {_format_value(value)}: {error}"
    except RecursionError:
        return f"{place} must be JSON with less nesting, got a {type(value).__name__} that is nested too deeply"
    return None


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}.. ({len(text)} characters)"


def _find_text_problem(place: str, value: Any) -> str | None:
    """Describe the first string that UTF-8 cannot encode, such as half a surrogate pair; None if all can be."""
    try:
        if _is_encodable(value):
            return None
        for inner, text in _iterate_placed_strings(place, value):
            if (position := _find_unencodable(text)) is not None:
                return f"{inner} must be text that UTF-8 can encode, got {text[position]!r} at character {position}"
    except RecursionError:
        return f"{place} is nested too deeply"
    return None


def _is_encodable(value: Any) -> bool:
    """Whether UTF-8 can encode all strings in a value. This is much faster than naming their places."""
    if isinstance(value, str):
        return value.isascii() or _find_unencodable(value) is None
    if isinstance(value, dict):
        return all(map(_is_encodable, value)) and all(map(_is_encodable, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_encodable, value))
    return not isinstance(value, Mapping)


def _find_unencodable(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _iterate_placed_strings(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iterate_placed_strings(f"a key of {place}", key)
            yield from _iterate_placed_strings(f"{place}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from _iterate_placed_strings(f"{place}[{k}]", item)


def get_image_source(part: Mapping[str, Any]) -> Any:
    """Get the image of an image part as it was given; None if it is missing.

    It may be inside an object: `{"url": ...}`, or `{"bytes": ..., "path": ...}` as the `datasets` library stores it. A
    key that is None counts as missing: data sets have all keys in all parts.
    """
    for key in (part["type"], "image"):
        source = part.get(key)
        if isinstance(source, Mapping):
            source = next((found for name in _IMAGE_KEYS if (found := source.get(name)) is not None), None)
        if source is not None:
            return source
    return None


def has_images(content: Any) -> bool:
    """Whether a message's content has image parts."""
    return isinstance(content, list) and any(part["type"] in IMAGE_TYPES for part in content)


def get_reasoning(message: Mapping[str, Any]) -> str | None:
    """The reasoning of a checked message, under whichever of its names; None if it has none."""
    for key in REASONING_KEYS:
        reasoning: str | None = message.get(key)
        if reasoning is not None:
            return reasoning
    return None


def get_text(content: Content) -> str:
    """Get the text of a message's content: its text parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def copy_containers(value: T) -> T:
    """Copy the lists and dictionaries in `value`, at any depth; everything else, such as images, is shared.

    `copy.deepcopy` copies images, and fails on arguments nested deeper than Python's stack.
    """
    if not isinstance(value, (dict, list)):
        return value
    whole: Any = value.copy()
    copies: dict[int, Any] = {id(value): whole}
    pending: list[Any] = [whole]
    while pending:
        parent = pending.pop()
        items = parent.items() if isinstance(parent, dict) else enumerate(parent)
        for key, child in [(key, child) for key, child in items if isinstance(child, (dict, list))]:
            if id(child) not in copies:
                copies[id(child)] = child.copy()
                pending.append(copies[id(child)])
            parent[key] = copies[id(child)]
    copy: T = whole
    return copy
