"""Shapes: the properties of a turn and its new messages that a certificate depends on, and examples of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from unbroken.messages import Content, ContentPart, Message
from unbroken.rendering.bridge.window import TextKind, WindowTurn
from unbroken.rendering.message_format import PROBE_NAMES

CALL_ID_PREFIX = "turn"
NEW_TEXT = "Nq7New"


class ContentKind(StrEnum):
    """The kind of a part of a message's content."""

    TEXT = "text"
    IMAGE = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessageShape:
    """A new message without its text."""

    role: str
    answered_call: int
    """Index of the turn's call that a tool message answers, -1 for none."""
    keys: frozenset[str]
    """Which of `name` and `tool_call_id` it has."""
    parts: tuple[ContentKind, ...] = ()
    """Its parts in order if it has images; empty otherwise, because texts without images are joined."""

    def __str__(self) -> str:
        answered = f" to call {self.answered_call}" if self.answered_call >= 0 else ""
        keys = f" with {' and '.join(sorted(self.keys))}" if self.keys else ""
        parts = f" of {', '.join(self.parts)}" if self.parts else ""
        return f"{self.role}{answered}{keys}{parts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeShape:
    """A turn and the new messages after it, without their texts."""

    num_calls: int
    text: TextKind
    new_messages: tuple[NewMessageShape, ...]

    def __str__(self) -> str:
        text = {TextKind.EMPTY: "no text", TextKind.BLANK: "white space", TextKind.WORDS: "text"}[self.text]
        calls = f" and {self.num_calls} call{'s' * (self.num_calls > 1)}" if self.num_calls else ""
        return f"{text}{calls}; then {', '.join(map(str, self.new_messages)) or 'nothing'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeExample:
    """An example of a shape, with sentinels as texts."""

    turn: WindowTurn
    new_messages: tuple[Message, ...]
    sentinels: tuple[tuple[str, ...], ...]
    """The texts of each of `new_messages`."""
    num_images: tuple[int, ...]

    @classmethod
    def build(cls, shape: BridgeShape, names: tuple[str, str] = (PROBE_NAMES[0], PROBE_NAMES[1])) -> ShapeExample:
        """Build the example; its calls alternate between the two names."""
        calls = tuple((names[k % 2], f"{CALL_ID_PREFIX}{k:05d}") for k in range(shape.num_calls))
        sentinels: list[tuple[str, ...]] = []
        messages: list[Message] = []
        for k, new in enumerate(shape.new_messages):
            name, call_id = calls[new.answered_call] if new.answered_call >= 0 else (names[0], f"{CALL_ID_PREFIX}other")
            message: Message = {"role": new.role, "content": f"{NEW_TEXT}{k}z"}
            texts: tuple[str, ...] = (f"{NEW_TEXT}{k}z",)
            if new.parts:
                texts = tuple(f"{NEW_TEXT}{k}p{j}z" for j, kind in enumerate(new.parts) if kind is ContentKind.TEXT)
                message["content"] = _build_parts(new.parts, texts)
            sentinels.append(texts)
            if "name" in new.keys:
                message["name"] = name
            if "tool_call_id" in new.keys:
                message["tool_call_id"] = call_id
            messages.append(message)
        return cls(
            turn=WindowTurn(calls=calls, text=shape.text),
            new_messages=tuple(messages),
            sentinels=tuple(sentinels),
            num_images=tuple(new.parts.count(ContentKind.IMAGE) for new in shape.new_messages),
        )

    def with_text(self, text: str) -> ShapeExample:
        """The example with `text` as every text of the new messages."""
        messages: list[Message] = []
        for message in self.new_messages:
            content: Content = text
            if isinstance(parts := message["content"], list):
                content = [{**part, "text": text} if part["type"] == "text" else part for part in parts]
            messages.append({**message, "content": content})
        return replace(self, new_messages=tuple(messages))


def _build_parts(kinds: tuple[ContentKind, ...], texts: tuple[str, ...]) -> list[ContentPart]:
    rest = iter(texts)
    return [{"type": "text", "text": next(rest)} if kind is ContentKind.TEXT else {"type": "image"} for kind in kinds]
