"""Messages and tool schemas in the OpenAI form: what datasets, agents and chat templates speak.

They are plain dictionaries because that is what all three exchange; `check_messages` guards the border. A tool call's
arguments are a dictionary (the decoded JSON object), or the string the model wrote where a caller prefers to keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypeAlias, TypedDict

from unbroken.errors import MessagesError


class TextPart(TypedDict):
    """A piece of text inside a message's content."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict, total=False):
    """An image inside a message's content; `image` is a PIL image, a path, or bytes."""

    type: Required[Literal["image", "image_url"]]
    image: Any
    image_url: dict[str, Any]


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


def check_messages(messages: Sequence[Message]) -> None:
    """Check what every template relies on, before one of them is rendered.

    Raises:
        MessagesError: there are no messages, one is not a mapping with a role, its content is neither text, parts nor
            None, or a tool call has no name. The message names the position and the value.
    """
    if not isinstance(messages, (list, tuple)):
        raise MessagesError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise MessagesError("messages must hold at least one message, got none")
    for position, message in enumerate(messages):
        _check_message(position, message)


def _check_message(position: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise MessagesError(f"messages[{position}] must be a mapping with a role, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessagesError(f"messages[{position}].role must be a non-empty string, got {role!r}")
    content = message.get("content")
    if not (content is None or isinstance(content, (str, list))):
        raise MessagesError(f"messages[{position}].content must be text, parts or None, got {type(content).__name__}")
    if isinstance(content, list):
        for k, part in enumerate(content):
            if not (isinstance(part, Mapping) and isinstance(part.get("type"), str)):
                raise MessagesError(f"messages[{position}].content[{k}] must be a part with a type, got {part!r}")
    for k, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]):
            raise MessagesError(f"messages[{position}].tool_calls[{k}] must have a function with a name, got {call!r}")


def text_of(content: Content) -> str:
    """The text of a message's content, with its parts joined; images contribute nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
