"""Messages and given ids as records of the store, and back: a record names images, which are stored once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from unbroken.ledger.nodes import Position
from unbroken.ledger.records import GivenRecord, ImageRecord
from unbroken.messages import IMAGE_TYPES, Message, get_image_source
from unbroken.rendering.base import ParsedResponse, ToolCallStatus
from unbroken.rollout.prompts import GivenIds
from unbroken.server.wire.reply import ReplyReader
from unbroken.types import EncodedImage

LoadImage = Callable[[str], EncodedImage]
"""Loads an image by its SHA-256."""


def make_messages(parsed: ParsedResponse, reply: ReplyReader) -> tuple[Message, Message]:
    """The reply as it is rendered, and as it was delivered, with the same call ids."""
    delivered_ids = iter([call.call_id for call in reply.calls])
    call_ids = [next(delivered_ids) if call.status is ToolCallStatus.OK else "" for call in parsed.tool_calls]
    delivered: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        delivered["reasoning_content"] = reply.reasoning
    if reply.calls:
        delivered["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return parsed.to_message(call_ids), delivered


def to_given_record(parent: Position | None, given: GivenIds) -> GivenRecord:
    """The record of given ids that are attached at `parent`."""
    return GivenRecord(
        parent=parent,
        origin=given.origin,
        token_ids=given.token_ids,
        message_indices=given.message_indices,
        images=tuple(map(ImageRecord.from_span, given.images)),
    )


def from_given_record(record: GivenRecord, load_image: LoadImage) -> GivenIds:
    """The given ids of a record."""
    return GivenIds(
        origin=record.origin,
        token_ids=record.token_ids,
        message_indices=record.message_indices,
        images=tuple(image.to_span(load_image(image.sha256)) for image in record.images),
    )


def list_images(messages: Sequence[Message]) -> list[EncodedImage]:
    """The images of messages, in order."""
    parts = [part for message in messages for part in _get_parts(message) if part["type"] in IMAGE_TYPES]
    sources = [get_image_source(part) for part in parts]
    return [source for source in sources if isinstance(source, EncodedImage)]


def name_images(message: Message) -> dict[str, Any]:
    """A message whose images are named by their hash."""
    record: dict[str, Any] = dict(message)
    if isinstance(message.get("content"), list):
        record["content"] = [
            {"type": "image", "sha256": get_image_source(part).sha256} if part["type"] in IMAGE_TYPES else part
            for part in _get_parts(message)
        ]
    return record


def from_json(record: Mapping[str, Any], load_image: LoadImage) -> Message:
    """The message of a record, with its images."""
    message = dict(record)
    if isinstance(message.get("content"), list):
        message["content"] = [
            {"type": "image", "image": load_image(part["sha256"])} if part["type"] == "image" else part
            for part in message["content"]
        ]
    return cast(Message, message)


def _get_parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
