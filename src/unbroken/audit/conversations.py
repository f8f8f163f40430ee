"""Makes random conversations from a seed: a history, the turn that ended, and the new messages after it.

No text spells a control token, so a correct bridge equals the template's own rendering, id for id. The turn's text and
its last call contain a mark, a word that occurs once, by which the judge finds the end of the turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.messages import Message, ToolCall, ToolSchema, make_call

TOOL_NAMES = ("search", "add_note")
TOOLS: tuple[ToolSchema, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
    for name, description in zip(TOOL_NAMES, ("Search the library.", "Keep a note."), strict=True)
)
_WORDS = (
    "the file was not found", "see page 12:30", "Größe & Straße", "où est la gare", "今天天气", "😀🎉", "e\u0301",
    '{"a": [1, 2.5, null]}', "def f(x):\n    return x\n\n", "a < b > c | d", "[1]", "'quoted' and \"quoted\"",
    "back\\slash \\n", "user", "assistant", "system", "tool", "\n", "  ", "\t", "x" * 40, "50 %", "100,000.00",
)  # fmt: skip
_HISTORY_LENGTHS, _HISTORY_WEIGHTS = (0, 1, 2, 3, 6, 12), (40, 25, 15, 10, 6, 4)


class Following(StrEnum):
    """The kinds of messages that follow a turn."""

    USER = "a user message"
    TWO_USERS = "two user messages"
    SYSTEM = "a system message, then a user message"
    RESULT = "a tool message after text"
    RESULTS = "the results of its calls"
    RESULTS_AND_USER = "the results of its calls and a user message"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The shape of a turn and of what follows it."""

    num_calls: int
    has_text: bool
    following: Following

    def __str__(self) -> str:
        calls = {0: "", 1: "1 call", 2: "2 calls", 3: "3 calls"}[self.num_calls]
        turn = " and ".join(filter(None, ("text" if self.has_text else "", calls)))
        return f"{turn}, then {self.following.value}"


def _situation(num_calls: int, following: Following, *, has_text: bool) -> Situation:
    return Situation(num_calls=num_calls, has_text=has_text, following=following)


SITUATIONS: tuple[tuple[Situation, int], ...] = (
    (_situation(0, Following.USER, has_text=True), 5),
    (_situation(1, Following.RESULTS, has_text=False), 5),
    (_situation(1, Following.RESULTS, has_text=True), 3),
    (_situation(2, Following.RESULTS, has_text=False), 3),
    (_situation(2, Following.RESULTS, has_text=True), 1),
    (_situation(3, Following.RESULTS, has_text=False), 1),
    (_situation(1, Following.RESULTS_AND_USER, has_text=False), 1),
    (_situation(0, Following.TWO_USERS, has_text=True), 1),
    (_situation(0, Following.SYSTEM, has_text=True), 1),
    (_situation(0, Following.RESULT, has_text=True), 1),
)
"""Each with its weight in random draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConversation:
    """One case to judge. The marks of the turn are in its text and last call; each new message has one mark."""

    situation: Situation
    history: tuple[Message, ...]
    turn: Message
    new_messages: tuple[Message, ...]
    turn_marks: tuple[str, ...]
    new_marks: tuple[str, ...]

    @property
    def messages(self) -> list[Message]:
        """History, turn and new messages."""
        return [*self.history, self.turn, *self.new_messages]


class ConversationMaker:
    """Makes conversations that a template can carry.

    A turn has at most `max_calls` calls (0 for templates that render no calls). With `with_reasoning` some turns have
    reasoning, with `with_system` some conversations begin with a system message.
    """

    def __init__(self, *, seed: int, max_calls: int, with_reasoning: bool, with_system: bool = True) -> None:
        self._rng = random.Random(seed)
        self._max_calls = max_calls
        self._with_reasoning = with_reasoning
        self._with_system = with_system
        self._num_marks = self._num_calls = 0

    def draw_conversations(self) -> Iterator[AuditConversation]:
        """Draw an endless series of conversations, each of a random situation."""
        known = [(each, weight) for each, weight in SITUATIONS if each.num_calls <= self._max_calls]
        situations, weights = [each for each, _ in known], [weight for _, weight in known]
        while True:
            yield self.make_conversation(self._rng.choices(situations, weights)[0])

    def make_conversation(
        self, situation: Situation, *, with_history: bool = True, with_reasoning: bool | None = None
    ) -> AuditConversation:
        """Make a conversation; `with_reasoning` None decides at random."""
        history = self._make_history() if with_history else [self._make_user()]
        turn, turn_marks = self._make_marked_turn(
            situation.num_calls, has_text=situation.has_text, with_reasoning=with_reasoning
        )
        marked = [self._add_mark(message) for message in self._make_following(situation.following, turn)]
        return AuditConversation(
            situation=situation,
            history=tuple(history),
            turn=turn,
            new_messages=tuple(message for message, _ in marked),
            turn_marks=turn_marks,
            new_marks=tuple(mark for _, mark in marked),
        )

    def make_turn(self, num_calls: int, *, with_reasoning: bool) -> Message:
        """Make a turn whose texts begin and end with words, so that nothing is trimmed."""
        message, _ = self._make_marked_turn(num_calls, has_text=num_calls == 0, with_reasoning=with_reasoning)
        return message

    def _make_history(self) -> list[Message]:
        rng, messages = self._rng, list[Message]()
        if rng.random() < 0.4 and self._with_system:
            messages.append({"role": "system", "content": self._make_text()})
        messages.append(self._make_user())
        for _ in range(rng.choices(_HISTORY_LENGTHS, _HISTORY_WEIGHTS)[0]):
            num_calls = min(rng.choice((0, 1, 1, 2)), self._max_calls)
            turn, _ = self._make_marked_turn(
                num_calls, has_text=num_calls == 0 or rng.random() < 0.3, with_reasoning=None
            )
            messages.append(turn)
            if num_calls:
                messages += self._make_results(turn)
                messages.append(self._make_marked_turn(0, has_text=True, with_reasoning=None)[0])
            messages.append(self._make_user())
        return messages

    def _make_marked_turn(
        self, num_calls: int, *, has_text: bool, with_reasoning: bool | None
    ) -> tuple[Message, tuple[str, ...]]:
        marks = []
        message: Message = {"role": "assistant", "content": ""}
        if has_text:
            marks.append(self._new_mark("said"))
            message["content"] = f"So: {self._make_text()}{marks[-1]}"
        reasons = self._rng.random() < 0.4 if with_reasoning is None else with_reasoning
        if reasons and self._with_reasoning:
            message["reasoning_content"] = f"Let me see. {self._make_text()} Done."
        if num_calls:
            marks.append(self._new_mark("called"))
            calls = [self._make_call() for _ in range(num_calls)]
            arguments: Any = calls[-1]["function"]["arguments"]
            arguments["note"] = marks[-1]
            message["tool_calls"] = calls
        return message, tuple(marks)

    def _make_call(self) -> ToolCall:
        rng = self._rng
        self._num_calls += 1
        arguments: dict[str, Any] = {"query": self._make_text(), "limit": rng.randrange(100)}
        if rng.random() < 0.3:
            arguments["filter"] = {"years": [1999, 2000.5], "open": rng.random() < 0.5}
        return make_call(f"call{self._num_calls:05d}", rng.choice(TOOL_NAMES), arguments)

    def _make_following(self, following: Following, turn: Message) -> list[Message]:
        match following:
            case Following.USER:
                return [self._make_user()]
            case Following.TWO_USERS:
                return [self._make_user(), self._make_user()]
            case Following.SYSTEM:
                return [{"role": "system", "content": self._make_text()}, self._make_user()]
            case Following.RESULT:
                return [{"role": "tool", "content": self._make_text(), "name": "search"}]
            case Following.RESULTS:
                return self._make_results(turn)
            case Following.RESULTS_AND_USER:
                return [*self._make_results(turn), self._make_user()]

    def _make_results(self, turn: Message) -> list[Message]:
        return [
            {"role": "tool", "content": self._make_text(), "tool_call_id": call["id"], "name": call["function"]["name"]}
            for call in turn["tool_calls"]
        ]

    def _make_user(self) -> Message:
        return {"role": "user", "content": self._make_text()}

    def _add_mark(self, message: Message) -> tuple[Message, str]:
        mark = self._new_mark("new")
        marked: Message = {
            **message,
            "content": f"{message['content']}{mark}{self._rng.choice(('', self._make_text()))}",
        }
        return marked, mark

    def _new_mark(self, kind: str) -> str:
        self._num_marks += 1
        return f"{kind}{self._num_marks:06d}q"

    def _make_text(self) -> str:
        """Some words with or without spaces between them; sometimes nothing."""
        rng = self._rng
        return rng.choice(("", " ")).join(rng.choices(_WORDS, k=rng.choice((0, 1, 1, 2, 3, 5))))
