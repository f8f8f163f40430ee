"""What a template reads of a conversation: the reads, and the values that carry them through a template.

A bridge is proven by varying whatever may change it. `dataflow` follows each value from the messages to the text that a
template writes, and says which reads may reach a bridge: the reads of *other* messages than the one being written (a
window has the new messages themselves, so what a template reads of those is exact), and the reads of the turn itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class ReadKind(StrEnum):
    """The kind of a read: what the template learns from it."""

    TEXT = "text"
    """Whether text equals, begins with, ends with or contains the `value`."""
    LENGTH = "length"
    """How the length of a text or list compares with the `value`."""
    COUNT = "count"
    """How a number of messages, or a position among them, compares with the `value`."""
    KEY = "key"
    """Whether a message has the key `value`, and what is under it."""
    ITEM = "item"
    """Whether something inside a message, such as a call's arguments, has the key `value`."""
    ROLE = "role"
    """Whether a role is the `value`."""
    PREDICATE = "predicate"
    """A property of a text, by the name of its method (`isdigit`)."""
    EQUAL = "equal"
    """Whether two texts are equal."""
    ID = "id"
    """Which call a result answers."""
    EMPTY = "empty"
    """Whether something is empty or missing."""
    OPAQUE = "opaque"
    """Anything else; the `value` describes it. No panel can be made for it."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read. `is_own`: of the message that is being written, else of any other."""

    kind: ReadKind
    value: Any = None
    is_own: bool = False


class Source(StrEnum):
    """What of the conversation a value is."""

    MESSAGES = "messages"
    MESSAGE = "message"
    ROLE = "role"
    ID = "id"
    TEXT = "text"
    """Anything inside a message, or a piece of it."""
    CHANGED = "changed"
    """Text made from such text, which may contain what no message does."""
    CALLS = "calls"
    """The list of calls of a message."""
    LENGTH = "length"
    CHANGED_LENGTH = "changed length"
    COUNT = "count"
    LOOP = "loop"


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression may be: parts of the conversation, constants, and the reads that it depends on."""

    sources: frozenset[tuple[Source, bool]] = frozenset()
    """Each with whether it is of the message being written."""
    reads: frozenset[Read] = frozenset()
    texts: frozenset[str] = frozenset()
    numbers: frozenset[int] = frozenset()

    def __or__(self, other: Value) -> Value:
        return Value(
            self.sources | other.sources,
            self.reads | other.reads,
            self.texts | other.texts,
            self.numbers | other.numbers,
        )

    def has(self, *kinds: Source) -> bool:
        """Whether the value may be one of these."""
        return any(kind in kinds for kind, _ in self.sources)

    def is_own(self, *kinds: Source) -> bool:
        """Whether all its sources of these kinds are of the message being written."""
        return all(own for kind, own in self.sources if not kinds or kind in kinds)

    def reading(self, kind: ReadKind, value: Any = None) -> Value:
        """The result of a read of this value: no source any more."""
        return Value(reads=self.reads | {Read(kind, value, self.is_own())})

    def become(self, kind: Source) -> Value:
        """The value, as something else."""
        return Value(frozenset((kind, own) for _, own in self.sources), self.reads)

    def forget_owner(self) -> Value:
        """The value as another message sees it."""
        sources = frozenset((kind, False) for kind, _ in self.sources)
        return replace(self, sources=sources, reads=forget_owner(self.reads))


def union(values: Iterable[Value]) -> Value:
    """What may be any of the values."""
    result = Value()
    for value in values:
        result |= value
    return result


def forget_owner(reads: frozenset[Read]) -> frozenset[Read]:
    """The reads as another message sees them."""
    return frozenset(replace(read, is_own=False) for read in reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReads:
    """The reads that may change a bridge."""

    of_history: frozenset[Read] = field(default_factory=frozenset)
    """Reads of any message, wherever it is written."""
    of_turn: frozenset[Read] = field(default_factory=frozenset)
    """Reads of the message that is being written, of which the turn is one."""
    keys: frozenset[str] = frozenset()
    """Keys of messages that are read anywhere."""
    roles: frozenset[str] = frozenset()
    """Roles that are compared with anywhere."""

    def get_values(self, kind: ReadKind) -> tuple[Any, ...]:
        """The values of one kind of read of the history, sorted."""
        return tuple(sorted({read.value for read in self.of_history if read.kind is kind and read.value is not None}))

    def get_all_values(self, kind: ReadKind) -> tuple[Any, ...]:
        """The values of one kind of read of the history or of the turn, sorted."""
        return tuple(sorted({read.value for read in self.of_history | self.of_turn if read.kind is kind}))

    def has(self, kind: ReadKind) -> bool:
        """Whether there is such a read of the history."""
        return any(read.kind is kind for read in self.of_history)
