"""The input of OpenAI's Responses to our messages.

    instructions                                one system message
    message                                     one message
    reasoning, message, function_call, ..       one assistant message: reasoning, content, calls
    function_call_output                        one tool message

All items of the assistant that follow one another are one message: they are the items of one reply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from unbroken.messages import Message, ToolCall
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.conversation import Conversation, make_call, refuse_misplaced, simplify_parts
from unbroken.server.wire.responses.body import (
    CallItem,
    ImagePart,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
    TextPart,
    flatten_name,
)
from unbroken.server.wire.seals import is_seal, unpack_seal


@dataclass(slots=True)
class _Reply:
    """The items of one reply."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def read_conversation(body: ResponsesBody) -> Conversation:
    """Translate a body's instructions and input.

    Raises:
        HttpError: a part is not allowed in its item, an output answers no call, or reasoning cannot be read.
        SamplingError: an item has a key that is not supported.
    """
    conversation = Conversation()
    if body.instructions:
        conversation.messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        conversation.messages.append({"role": "user", "content": body.input})
        return conversation
    reply: _Reply | None = None
    for k, item in enumerate(body.input):
        place = f"input.{k}"
        item.refuse_extra(place)
        if isinstance(item, (CallItem, ReasoningItem)) or (isinstance(item, MessageItem) and item.role == "assistant"):
            reply = reply or _Reply()
            _add_to_reply(reply, place, item)
            continue
        if reply is not None:
            conversation.add_reply(content=reply.content, reasoning=reply.reasoning, calls=reply.calls)
            reply = None
        conversation.messages.append(_read_given(conversation, place, item))
    if reply is not None:
        conversation.add_reply(content=reply.content, reasoning=reply.reasoning, calls=reply.calls)
    return conversation


def _add_to_reply(reply: _Reply, place: str, item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, CallItem):
        _check_arguments(place, item.arguments)
        reply.calls.append(make_call(item.call_id, flatten_name(item.namespace, item.name), item.arguments))
    elif isinstance(item, ReasoningItem):
        reply.reasoning += _read_reasoning(place, item)
    elif isinstance(item.content, str):
        reply.content += item.content
    else:
        for k, part in enumerate(item.content):
            if not isinstance(part, TextPart):
                raise refuse_misplaced(f"{place}.content.{k}", part.type, item.role)
            part.refuse_extra(f"{place}.content.{k}")
            reply.content += part.text


def _read_given(conversation: Conversation, place: str, item: MessageItem | OutputItem) -> Message:
    if isinstance(item, MessageItem):
        content = _read_content(conversation, f"{place}.content", item.content)
        return cast(Message, {"role": item.role, "content": content})
    conversation.check_answers(item.call_id, place=f"{place}.call_id", call="function_call")
    content = _read_content(conversation, f"{place}.output", item.output)
    return cast(Message, {"role": "tool", "tool_call_id": item.call_id, "content": content})


def _read_content(conversation: Conversation, place: str, content: str | list[TextPart | ImagePart]) -> Any:
    """One text as it is, anything else as parts."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for k, part in enumerate(content):
        part.refuse_extra(f"{place}.{k}")
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append(conversation.make_image_part(part.image_url, place=f"{place}.{k}.image_url"))
    return simplify_parts(parts)


def _read_reasoning(place: str, item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content and is_seal(item.encrypted_content):
        text = unpack_seal(item.encrypted_content)
        if text is None:
            raise HttpError(
                400,
                f"{place}.encrypted_content must come back as this server wrote it",
                param=f"{place}.encrypted_content",
            )
        return text
    if item.summary:
        return "\n\n".join(part.text for part in item.summary)
    if item.encrypted_content:
        raise HttpError(
            400,
            f"{place} must have content or a summary: its encrypted_content is another server's",
            param=f"{place}.encrypted_content",
        )
    return ""


def _check_arguments(place: str, arguments: str) -> None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HttpError(
            400,
            f"{place}.arguments must be a JSON object as text, got {shorten(arguments)}",
            param=f"{place}.arguments",
        )
