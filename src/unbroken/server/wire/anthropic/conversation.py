"""Anthropic's messages to ours.

user        text, image                 one user message
user        tool_result, .., text       a tool message for each result, then a user message
assistant   thinking, text, tool_use    one assistant message: reasoning, content, calls
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from unbroken.messages import Message
from unbroken.server.http.errors import HttpError
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
from unbroken.server.wire.conversation import Conversation, make_call, refuse_misplaced, simplify_parts
from unbroken.server.wire.seals import fits_seal, is_seal, unpack_seal


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
            raise refuse_misplaced(place, block.type, message.role)
    end_message()


def _read_result(conversation: Conversation, place: str, block: ToolResultBlock) -> Message:
    block.refuse_extra(place)
    conversation.check_answers(block.tool_use_id, place=f"{place}.tool_use_id", call="tool_use block")
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
            calls.append(make_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
        else:
            raise refuse_misplaced(place, block.type, message.role)
        block.refuse_extra(place)
    conversation.add_reply(content=content, reasoning=reasoning, calls=calls)


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
        if isinstance(source, Base64Source):
            url, field = f"data:{source.media_type};base64,{source.data}", "data"
        else:
            url, field = source.url, "url"
        parts.append(conversation.make_image_part(url, place=f"{place}.source.{field}"))
    return simplify_parts(parts)
