"""Conversations of dialects that have another form of messages than OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.messages import Message, ToolCall
from unbroken.server.http.errors import HttpError, shorten


@dataclass(slots=True)
class Conversation:
    """Messages in the OpenAI form of chat completions, their images not loaded."""

    messages: list[Message] = field(default_factory=list)
    image_places: list[str] = field(default_factory=list)
    """The field of each image in the request, in order."""
    call_ids: set[str] = field(default_factory=set)
    """Of all calls so far."""

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


def make_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Make a call; `arguments` are the text of a JSON object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def refuse_misplaced(place: str, kind: str, role: str) -> HttpError:
    """The error for content that a message of this role must not have."""
    return HttpError(400, f"{place} must not be of the type {kind!r} in a message of the role {role!r}", param=place)
