"""The shape of a turn and of what follows it: what a certificate is issued for, and the same with sentinel texts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unbroken.messages import Message
from unbroken.rendering.forms import PROBE_NAMES
from unbroken.rendering.window import Turn, TurnText

CALL_ID_PREFIX = "turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessageShape:
    """What a certificate depends on in a new message: all but its text."""

    role: str
    answers: int
    """The turn's call that a tool message answers, -1 for none."""
    keys: frozenset[str]
    """Which of `name` and `tool_call_id` it has."""

    def __str__(self) -> str:
        answered = f" to call {self.answers}" if self.answers >= 0 else ""
        keys = f" with {' and '.join(sorted(self.keys))}" if self.keys else ""
        return f"{self.role}{answered}{keys}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a certificate depends on in a turn and the new messages after it."""

    num_calls: int
    text: TurnText
    new_messages: tuple[NewMessageShape, ...]

    def __str__(self) -> str:
        text = {TurnText.NONE: "no text", TurnText.BLANK: "white space", TurnText.WORDS: "text"}[self.text]
        calls = f" and {self.num_calls} call{'s' * (self.num_calls > 1)}" if self.num_calls else ""
        return f"{text}{calls}; then {', '.join(map(str, self.new_messages)) or 'nothing'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape with sentinels for its texts."""

    turn: Turn
    new_messages: tuple[Message, ...]
    sentinels: tuple[str, ...]
    """The new messages' texts."""

    @classmethod
    def of(cls, shape: Shape, names: tuple[str, str] = (PROBE_NAMES[0], PROBE_NAMES[1])) -> Case:
        """The case of a shape, whose calls take these names in turn."""
        calls = tuple((names[k % 2], f"{CALL_ID_PREFIX}{k:05d}") for k in range(shape.num_calls))
        sentinels = tuple(f"Nq7New{k}z" for k in range(len(shape.new_messages)))
        messages = []
        for new, sentinel in zip(shape.new_messages, sentinels, strict=True):
            name, call_id = calls[new.answers] if new.answers >= 0 else (names[0], f"{CALL_ID_PREFIX}other")
            message: Message = {"role": new.role, "content": sentinel}
            if "name" in new.keys:
                message["name"] = name
            if "tool_call_id" in new.keys:
                message["tool_call_id"] = call_id
            messages.append(message)
        return cls(turn=Turn(calls=calls, text=shape.text), new_messages=tuple(messages), sentinels=sentinels)

    def with_text(self, text: str) -> Case:
        """The case with `text` for the text of every new message."""
        messages: list[Message] = [{**message, "content": text} for message in self.new_messages]
        return replace(self, new_messages=tuple(messages))
