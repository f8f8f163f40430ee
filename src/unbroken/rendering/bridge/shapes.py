"""The shape of a turn and of what follows it: what a certificate is issued for, and the same with sentinel texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from unbroken.messages import Content, ContentPart, Message
from unbroken.rendering.bridge.window import TextKind, WindowTurn
from unbroken.rendering.message_format import PROBE_NAMES

CALL_ID_PREFIX = "turn"


class ContentKind(StrEnum):
    """What a part of a message's content is."""

    TEXT = "text"
    IMAGE = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessageShape:
    """What a certificate depends on in a new message: all but its text."""

    role: str
    answers: int
    """The turn's call that a tool message answers, -1 for none."""
    keys: frozenset[str]
    """Which of `name` and `tool_call_id` it has."""
    parts: tuple[ContentKind, ...] = ()
    """Its parts in order if there are images among them; the parts of a text are one text."""

    def __str__(self) -> str:
        answered = f" to call {self.answers}" if self.answers >= 0 else ""
        keys = f" with {' and '.join(sorted(self.keys))}" if self.keys else ""
        parts = f" of {', '.join(self.parts)}" if self.parts else ""
        return f"{self.role}{answered}{keys}{parts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeShape:
    """What a certificate depends on in a turn and the new messages after it."""

    num_calls: int
    text: TextKind
    new_messages: tuple[NewMessageShape, ...]

    def __str__(self) -> str:
        text = {TextKind.EMPTY: "no text", TextKind.BLANK: "white space", TextKind.WORDS: "text"}[self.text]
        calls = f" and {self.num_calls} call{'s' * (self.num_calls > 1)}" if self.num_calls else ""
        return f"{text}{calls}; then {', '.join(map(str, self.new_messages)) or 'nothing'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeExample:
    """A shape with sentinels for its texts."""

    turn: WindowTurn
    new_messages: tuple[Message, ...]
    sentinels: tuple[tuple[str, ...], ...]
    """The texts of each new message."""
    num_images: tuple[int, ...]
    """How many images each new message has."""

    @classmethod
    def build(cls, shape: BridgeShape, names: tuple[str, str] = (PROBE_NAMES[0], PROBE_NAMES[1])) -> ShapeExample:
        """The case of a shape, whose calls take these names in turn."""
        calls = tuple((names[k % 2], f"{CALL_ID_PREFIX}{k:05d}") for k in range(shape.num_calls))
        sentinels: list[tuple[str, ...]] = []
        messages: list[Message] = []
        for k, new in enumerate(shape.new_messages):
            name, call_id = calls[new.answers] if new.answers >= 0 else (names[0], f"{CALL_ID_PREFIX}other")
            message: Message = {"role": new.role, "content": f"Nq7New{k}z"}
            texts: tuple[str, ...] = (f"Nq7New{k}z",)
            if new.parts:
                texts = tuple(f"Nq7New{k}p{j}z" for j, kind in enumerate(new.parts) if kind is ContentKind.TEXT)
                message["content"] = _parts(new.parts, texts)
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
        """The case with `text` for the text, or each part of the text, of every new message."""
        messages: list[Message] = []
        for message in self.new_messages:
            content: Content = text
            if isinstance(parts := message["content"], list):
                content = [{**part, "text": text} if part["type"] == "text" else part for part in parts]
            messages.append({**message, "content": content})
        return replace(self, new_messages=tuple(messages))


def _parts(kinds: tuple[ContentKind, ...], texts: tuple[str, ...]) -> list[ContentPart]:
    rest = iter(texts)
    return [{"type": "text", "text": next(rest)} if kind is ContentKind.TEXT else {"type": "image"} for kind in kinds]
