"""Anthropic's messages to ours.

user        text, image                 one user message
user        tool_result, .., text       a tool message for each result, then a user message
assistant   thinking, text, tool_use    one assistant message: reasoning, content, calls
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from unbroken.messages import Message
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.anthropic.body import (
    Base64Source,
    ConversationBody,
    ImageBlock,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from unbroken.server.wire.seals import fits_seal, is_seal, unpack_seal


@dataclass(slots=True)
class Conversation:
    """Messages in the OpenAI form, their images not loaded."""

    messages: list[Message] = field(default_factory=list)
    image_places: list[str] = field(default_factory=list)
    """The field of each image, in order."""
    call_ids: set[str] = field(default_factory=set)


def read_conversation(body: ConversationBody) -> Conversation:
    """Translate a body's system prompt and messages.

    Raises:
        HttpError: a block is not allowed in its message, a result answers no call, or a signature does not fit.
        SamplingError: a block has a key that is not supported.
    """
    conversation = Conversation()
    if body.system:
        blocks = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system
        content = _read_content(conversation, ((f"system.{k}", block) for k, block in enumerate(blocks)))
        conversation.messages.append({"role": "system", "content": content})
    for k, message in enumerate(body.messages):
        if message.role == "assistant":
            _read_assistant(conversation, f"messages.{k}", message)
        else:
            _read_user(conversation, f"messages.{k}", message)
    if body.messages and body.messages[-1].role == "assistant":
        raise HttpError(
            400,
            f"messages.{len(body.messages) - 1} must not be an assistant message: this server does not continue the "
            "text of a message (prefill)",
            param="messages",
        )
    return conversation


def _read_user(conversation: Conversation, name: str, message: InputMessage) -> None:
    if isinstance(message.content, str):
        conversation.messages.append({"role": message.role, "content": message.content})
        return
    waiting: list[tuple[str, TextBlock | ImageBlock]] = []

    def end_message() -> None:
        if waiting:
            content = _read_content(conversation, waiting)
            conversation.messages.append({"role": message.role, "content": content})
            waiting.clear()

    for k, block in enumerate(message.content):
        place = f"{name}.content.{k}"
        if isinstance(block, ToolResultBlock) and message.role == "user":
            end_message()
            conversation.messages.append(_read_result(conversation, place, block))
        elif isinstance(block, TextBlock) or (isinstance(block, ImageBlock) and message.role == "user"):
            waiting.append((place, block))
        else:
            raise _misplaced(place, block.type, message.role)
    end_message()


def _read_result(conversation: Conversation, place: str, block: ToolResultBlock) -> Message:
    block.refuse_extra(place)
    if block.tool_use_id not in conversation.call_ids:
        raise HttpError(
            400,
            f"{place}.tool_use_id must be the id of an earlier tool_use block, got {shorten(block.tool_use_id)}",
            param=f"{place}.tool_use_id",
        )
    content: Any = block.content or ""
    if not isinstance(content, str):
        content = _read_content(conversation, ((f"{place}.content.{k}", one) for k, one in enumerate(content)))
    message: dict[str, Any] = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if block.is_error:
        message["is_error"] = True
    return cast(Message, message)


def _read_assistant(conversation: Conversation, name: str, message: InputMessage) -> None:
    if isinstance(message.content, str):
        conversation.messages.append({"role": "assistant", "content": message.content})
        return
    content, reasoning, calls = "", "", []
    for k, block in enumerate(message.content):
        place = f"{name}.content.{k}"
        if isinstance(block, TextBlock):
            content += block.text
        elif isinstance(block, ThinkingBlock):
            reasoning += _read_thinking(place, block)
        elif isinstance(block, ToolUseBlock):
            calls.append(block)
        else:
            raise _misplaced(place, block.type, message.role)
        block.refuse_extra(place)
    translated: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        translated["reasoning_content"] = reasoning
    if calls:
        conversation.call_ids |= {call.id for call in calls}
        translated["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    conversation.messages.append(translated)


def _read_thinking(place: str, block: ThinkingBlock) -> str:
    """The reasoning of a block: its text, or what its signature brings back where the text was omitted."""
    if not is_seal(block.signature) or fits_seal(block.signature, block.thinking):
        return block.thinking
    packed = unpack_seal(block.signature)
    if packed is None or block.thinking:
        raise HttpError(
            400,
            f"{place}.signature must fit the block's thinking, which this server wrote: send both back as they came, "
            "or leave the block out",
            param=f"{place}.signature",
        )
    return packed


def _read_content(conversation: Conversation, blocks: Iterable[tuple[str, TextBlock | ImageBlock]]) -> Any:
    """One text as it is, anything else as parts."""
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        block.refuse_extra(place)
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
            continue
        source = block.source
        is_data = isinstance(source, Base64Source)
        url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
        parts.append({"type": "image_url", "image_url": {"url": url}})
        conversation.image_places.append(f"{place}.source.{'data' if is_data else 'url'}")
    return _simplify(parts)


def _simplify(parts: Sequence[dict[str, Any]]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)


def _misplaced(place: str, kind: str, role: str) -> HttpError:
    return HttpError(400, f"{place} must not be of the type {kind!r} in a message of the role {role!r}", param=place)
