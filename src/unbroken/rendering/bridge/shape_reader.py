"""Reads the shape of a turn and its new messages, and refuses what no bridge can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unbroken.errors import MessagesError
from unbroken.messages import IMAGE_TYPES, Message, check_messages, get_text, has_images
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import BridgeShape, ContentKind, NewMessageShape
from unbroken.rendering.bridge.window import TextKind, WindowTurn
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.message_format import MessageFormat


class ShapeReader:
    """Reads shapes for one template and one tokenizer. Its methods raise `BridgeRefusedError`."""

    def __init__(self, message_format: MessageFormat, encoder: SafeEncoder) -> None:
        self._message_format = message_format
        self._encoder = encoder

    def read_turn(self, assistant: Message) -> WindowTurn:
        """The parts of a checked turn that a window depends on."""
        if has_images(assistant.get("content")):
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, "a sampled turn has no images")
        calls = tuple(
            (call["function"]["name"], str(call.get("id") or "")) for call in assistant.get("tool_calls") or ()
        )
        if not self._message_format.renders_calls:
            # To this template, calls are part of the text.
            text = TextKind.WORDS if calls else TextKind.of(get_text(assistant.get("content")))
            return WindowTurn(calls=(), text=text)
        return WindowTurn(calls=calls, text=TextKind.of(get_text(assistant.get("content"))))

    def read_shape(self, turn: WindowTurn, new_messages: Sequence[Message]) -> BridgeShape:
        """The shape of the turn and the new messages, which are checked."""
        try:
            check_messages(new_messages)
        except MessagesError as error:
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
        call_numbers = {call_id: k for k, (_, call_id) in reversed(list(enumerate(turn.calls)))}
        return BridgeShape(
            num_calls=len(turn.calls),
            text=turn.text,
            new_messages=tuple(self._read_new_message(message, call_numbers) for message in new_messages),
        )

    def _read_new_message(self, message: Message, call_numbers: Mapping[str, int]) -> NewMessageShape:
        role, call_id = message["role"], message.get("tool_call_id")
        if role == "assistant":
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, "an assistant message cannot extend a sampled turn")
        if self._encoder.spells_control(role):
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, f"the role {role!r} has a control token in it")
        if call_id is not None and call_id not in call_numbers and self._message_format.renders_calls:
            raise BridgeRefusedError(
                RefusalReason.BAD_EXTENSION, f"tool_call_id {call_id!r} is not one of the turn's {list(call_numbers)}"
            )
        keys = frozenset(key for key in ("name", "tool_call_id") if message.get(key) is not None)
        content = message.get("content")
        return NewMessageShape(
            role=role,
            answered_call=call_numbers.get(call_id or "", -1),
            keys=keys,
            parts=_get_part_kinds(content) if has_images(content) else (),
        )


def _get_part_kinds(parts: Any) -> tuple[ContentKind, ...]:
    return tuple(ContentKind.IMAGE if part["type"] in IMAGE_TYPES else ContentKind.TEXT for part in parts)
