"""Messages, tools and seals of the dialects that have conversations.

A seal shows that reasoning which a client sends back is ours and unchanged; it hides nothing. Anthropic's clients get
it as `signature`, OpenAI's as `encrypted_content`:

    make_seal("hm")                 "unbroken1.9b1f..."             a digest, where the client gets the text itself
    make_seal("hm", packed=True)    "unbroken1.9b1f....aG0="        with the text, where the client gets nothing else
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, cast

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from unbroken.images.loader import find_image_parts
from unbroken.messages import Message, ToolCall, ToolSchema
from unbroken.server.http.bodies import BodyModel
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.fields import Fields

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(slots=True)
class ConversationBuilder:
    """Messages in the OpenAI form of chat completions, their images not loaded."""

    messages: list[Message] = field(default_factory=list)
    image_places: list[str] = field(default_factory=list)
    """The field of each image in the request, in order."""
    call_ids: set[str] = field(default_factory=set)
    """Of all calls so far."""
    ignored: dict[str, None] = field(default_factory=dict)
    """The keys inside messages that have no effect, in order."""

    def check_extra(self, fields: Fields, given: Mapping[str, Any] | None, place: str) -> None:
        """Note the keys of an object inside a message that are ignored. Raises `HttpError` for others."""
        if given:
            self.ignored |= {_NUMBER.sub("", name): None for name in fields.check(given, place=place)}

    def add_earlier(self, messages: Sequence[Message]) -> None:
        """Add messages that are recorded, with their images."""
        self.messages.extend(messages)
        self.image_places += [f"an earlier answer's {place}" for place, _ in find_image_parts(messages)]
        self.call_ids |= {call["id"] for message in messages for call in message.get("tool_calls") or ()}

    def make_image_part(self, url: str, *, place: str) -> dict[str, Any]:
        """Make the part of an image, and remember its place."""
        self.image_places.append(place)
        return {"type": "image_url", "image_url": {"url": url}}

    def check_answers(self, call_id: str, *, place: str, call: str) -> None:
        """Raise `HttpError` for the result of a call that never was; `call` is the dialect's word for one."""
        if call_id not in self.call_ids:
            raise HttpError(400, f"{place} must be the id of an earlier {call}, got {shorten(call_id)}", param=place)

    def add_reply(self, *, content: str, reasoning: str, calls: Sequence[ToolCall]) -> None:
        """Add a message of the assistant, as chat completions answer it."""
        message: Message = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = list(calls)
            self.call_ids |= {call["id"] for call in calls}
        self.messages.append(message)


def simplify_parts(parts: Sequence[dict[str, Any]]) -> Any:
    """The content of a message: a single text as it is, anything else as parts."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)


def fill_arguments(messages: Sequence[Any]) -> Sequence[Any]:
    """Messages in which empty arguments of calls are `{}`: clients send "" and null for a call without arguments."""
    return [_fill_call(message) if message.get("tool_calls") else message for message in messages]


def _fill_call(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not any(_is_without_arguments(call) for call in calls):
        return message
    filled = [
        {**call, "function": {**call["function"], "arguments": "{}"}} if _is_without_arguments(call) else call
        for call in calls
    ]
    return {**message, "tool_calls": filled}


def _is_without_arguments(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    arguments = function.get("arguments")
    return arguments is None or (isinstance(arguments, str) and not arguments.strip())


def refuse_misplaced(place: str, kind: str, role: str) -> HttpError:
    """The error for content that a message of this role must not have."""
    return HttpError(400, f"{place} must not be of the type {kind!r} in a message of the role {role!r}", param=place)


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Refuse a tool whose calls could not be read."""
    if (kind := tool.get("type", "function")) != "function":
        raise PydanticCustomError(
            "type", "of the type {found} is no tool that this server takes (function)", {"found": shorten(kind)}
        )
    if "type" in tool and not (isinstance(name := get_name(tool), str) and name):
        raise PydanticCustomError("name", "must have a function with a name")
    function = tool.get("function", tool)  # without a type it may be the function itself, as some data sets have it
    for name, kind in (("name", str), ("description", str), ("parameters", dict)):
        value = function.get(name) if isinstance(function, dict) else function
        if not isinstance(value, (kind, NoneType)) or (name == "name" and not value):
            rule = {"name": "a text that is not empty", "description": "a text", "parameters": "an object"}[name]
            raise PydanticCustomError(
                "function", "must have a function whose {name} is {rule}", {"name": name, "rule": rule}
            )
    return tool


Tools = Annotated[list[Annotated[dict[str, Any], AfterValidator(_check_tool)]], Field(fail_fast=True)]
"""The tools of dialects in OpenAI's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools a reply may call, and must call. See the fields of `Question`."""

    reads_calls: bool
    required_functions: Sequence[ToolSchema] = ()
    may_call_several: bool = True


class HostedTool(BodyModel):
    """A tool whose parameters the API's provider knows and we do not, such as `web_search` or `bash_20250124`: the
    prompt does not have it, which a header of the answer says.
    """

    model_config = ConfigDict(extra="allow")

    type: str


def list_hosted(tools: Iterable[object]) -> list[str]:
    """The names of the hosted tools among these, each once, for the header of ignored fields."""
    return list(dict.fromkeys(f"tools.{tool.type}" for tool in tools if isinstance(tool, HostedTool)))


def make_tool(name: str, description: str | None, parameters: Any) -> ToolSchema:
    """Make a tool in the OpenAI form, as its chat clients send it."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return cast(ToolSchema, {"type": "function", "function": function})


def get_name(tool: Any) -> Any:
    """Get the name of a tool; None where it has no function, as a client's may."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def require_tool(tools: Sequence[ToolSchema], *, name: str | None, choice: Any) -> Sequence[ToolSchema]:
    """The tools of which one must be called: the one with this name, or all. Raises `HttpError` if there are none."""
    chosen = [tool for tool in tools if name is None or get_name(tool) == name]
    if not chosen:
        raise HttpError(400, f"tool_choice must match a function in tools, got {shorten(choice)}", param="tool_choice")
    return chosen


_PREFIX = "unbroken1"
_KEY = b"unbroken: reasoning"
_MAX_CHARS = 2**24
"""Longest packed text: a seal comes from outside, and a small one could expand to gigabytes."""


def make_seal(text: str, *, packed: bool = False) -> str:
    """Make the seal of a reasoning text; with `packed` it contains the text."""
    parts = [_PREFIX, _digest(text)]
    if packed:
        parts.append(base64.b64encode(zlib.compress(text.encode())).decode())
    return ".".join(parts)


def is_seal(seal: str) -> bool:
    """Whether a seal is ours; those of other servers cannot be checked."""
    return seal.startswith(f"{_PREFIX}.")


def fits_seal(seal: str, text: str) -> bool:
    """Whether this is the text that was sealed."""
    return seal.split(".")[1:2] == [_digest(text)]


def unpack_seal(seal: str) -> str | None:
    """The text in a packed seal of ours; None for other seals, and if text and digest do not match."""
    parts = seal.split(".")
    if len(parts) != 3 or parts[0] != _PREFIX:
        return None
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(base64.b64decode(parts[2], validate=True), _MAX_CHARS).decode()
    except (binascii.Error, ValueError, zlib.error):
        return None
    return text if inflate.eof and fits_seal(seal, text) else None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), key=_KEY, digest_size=16).hexdigest()
