"""Ways of requests through a forest, kept so that the next request is matched from where it differs.

An agent sends its whole conversation with every request, and most of it as it did before:

    before    system ─ user                             forms 2, levels [start] [system] [user]
    now       system ─ user ─ reply 0 ─ tool            2 messages are known: reply 0 and tool are identified,
                                                        and looked for after [user]

A walk holds nothing that a new match would not find: its forms hold while the known defaults of tools stay the same,
and a level holds while no message is recorded after one of an earlier level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.ledger.matching import MessageForm, Place, Tolerance
from unbroken.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A recorded path that repeats the first messages of a request."""

    node: int | None = None
    """Its last node; None if it has none."""
    turn: int | None = None
    """Its last sampled turn."""
    has_user: bool = False
    tolerances: frozenset[Tolerance] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One request's way; never changed."""

    messages: Sequence[Message] = ()
    """As they came."""
    has_one_spelling: Sequence[bool] = ()
    """Of each message, whether one that is equal in Python is equal in JSON too."""
    forms: Sequence[MessageForm] = ()
    places: Sequence[Place]
    """Before each message, and after the last."""
    levels: Sequence[Sequence[Reached]] = ((Reached(),),)
    """All paths that repeat the first k messages, for each k up to the longest path."""
    num_nodes: int = 0
    """How many nodes of the forest the levels know of."""
    num_learned: int = 0
    """How many sets of tools the forms know of."""

    def count_common(self, messages: Sequence[Message]) -> int:
        """Count the first messages that are those of this walk, letter for letter."""
        number = 0
        for known, has_one_spelling, message in zip(self.messages, self.has_one_spelling, messages, strict=False):
            if known != message or not (has_one_spelling or repr(known) == repr(message)):
                break
            number += 1
        return number

    def cut(self, number: int) -> Walk:
        """The walk of its first `number` messages."""
        return Walk(
            messages=self.messages[:number],
            has_one_spelling=self.has_one_spelling[:number],
            forms=self.forms[:number],
            places=self.places[: number + 1],
            levels=self.levels[: number + 1],
            num_nodes=self.num_nodes,
            num_learned=self.num_learned,
        )


class Walks:
    """The last walks of a session: one for each conversation that goes on beside others."""

    _MAX_KEPT = 8

    def __init__(self) -> None:
        self._kept: list[Walk] = []

    def find(self, messages: Sequence[Message], *, num_learned: int) -> Walk | None:
        """The kept walk that begins with the most of these messages, cut where it differs; None if no walk matches."""
        number, best = 0, None
        for walk in self._kept:
            if walk.num_learned == num_learned and (common := walk.count_common(messages)) > number:
                number, best = common, walk
        return None if best is None else best.cut(number)

    def keep(self, walk: Walk) -> None:
        """Keep a walk, in the place of the one that it continues, or of the oldest."""
        others = [kept for kept in self._kept if not _continues(walk, kept)]
        self._kept = [*others[1 - self._MAX_KEPT :], walk]


def has_one_spelling(message: Message) -> bool:
    """Whether messages that are equal to this one in Python are equal in JSON too.

    Numbers are not (1 == 1.0 == True), nor is the order of arguments that are an object.
    """
    calls: Any = message.get("tool_calls") or ()
    return _is_text(message.values()) and all(isinstance(call["function"].get("arguments"), str) for call in calls)


def _is_text(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, dict):
            if not _is_text(value.values()):
                return False
        elif isinstance(value, list):
            if not _is_text(value):
                return False
        elif not (value is None or isinstance(value, str)):
            return False
    return True


def _continues(walk: Walk, kept: Walk) -> bool:
    """Whether a walk begins with all messages of another, which it was then made from."""
    number = len(kept.messages)
    if number == 0 or number > len(walk.messages):
        return number == 0
    return walk.messages[0] is kept.messages[0] and walk.messages[number - 1] is kept.messages[-1]
