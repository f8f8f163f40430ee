"""Reads the facts of a history that its classes depend on.

They are folded message by message and kept, so that a turn costs what was added since the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from unbroken.messages import Message
from unbroken.rendering.bridge.histories.history_class import (
    Counted,
    HistoryClass,
    Regularity,
    find_system,
    iterate_texts,
)

_MAX_FOLDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFacts:
    """The facts about one history that a class may depend on."""

    has_results: bool
    has_system: bool | None
    """None if there is a system message, but not at the beginning."""
    ends_in_result: bool
    is_regular: bool
    texts: frozenset[str]
    """Those of the watched texts that occur in it."""
    counts: Mapping[Counted, int]

    @property
    def class_key(self) -> tuple[object, ...]:
        """Equal for histories that are in the same classes, whatever their counts are."""
        return self.has_results, self.has_system, self.ends_in_result, self.is_regular, self.texts

    def find_classes(self, without: frozenset[str]) -> Iterator[HistoryClass]:
        """The classes that include the history, from wide to narrow, without `ANY_HISTORY`.

        `without` are texts that may matter; they are assumed absent only if they are.
        """
        base = HistoryClass(without=without - self.texts)
        classes = [base] if base.without else []
        countable = [base]
        if self.is_regular:
            regular = replace(base, is_regular=True)
            classes.append(regular)
            countable.append(regular)
        by_result = replace(base, has_results=self.has_results)
        classes.append(by_result)
        if self.is_regular and self.has_system is not None:
            narrow = replace(by_result, is_regular=True, has_system=self.has_system, ends_in_result=self.ends_in_result)
            classes.append(narrow)
            countable.append(narrow)
        yield from classes
        yield from (replace(wider, counted=counted) for counted in Counted for wider in countable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FactsSoFar:
    """The facts after some of the messages of a conversation."""

    has_results: bool = False
    has_any_system: bool = False
    order: Regularity = field(default_factory=Regularity)
    texts: frozenset[str] = frozenset()
    counts: tuple[int, ...] = (0,) * len(Counted)
    """In the order of `Counted`."""


@dataclass(slots=True)
class _Fold:
    """The facts of one conversation after each of its messages, and the messages themselves, to recognise them."""

    messages: list[Message] = field(default_factory=list)
    contents: list[Any] = field(default_factory=list)
    after: list[_FactsSoFar] = field(default_factory=list)
    first_ids: dict[str, int] = field(default_factory=dict)
    """Call id -> the number of messages up to its first use."""

    def count_known(self, history: Sequence[Message]) -> int:
        """How many messages of the fold the history begins with; fewer than all of them if it forks."""
        size = min(len(self.messages), len(history))
        contents = _get_contents(history[:size])
        if self.messages[:size] == list(history[:size]) and self.contents[:size] == contents:
            return size  # lists of the same objects are compared without looking into them
        same = (a is b and c is d for a, b, c, d in zip(self.messages, history, self.contents, contents, strict=False))
        return next((k for k, is_same in enumerate(same) if not is_same), size)


def _get_contents(messages: Sequence[Message]) -> list[Any]:
    try:
        return list(map(itemgetter("content"), messages))
    except KeyError:
        return [message.get("content") for message in messages]


class HistoryReader:
    """Reads the facts of histories; `watched` are the texts to look for.

    A conversation that grew is recognised by its message objects, which must not be changed in place. Not for use by
    several threads at a time.
    """

    def __init__(self, watched: Sequence[str]) -> None:
        self._watched = tuple({text.lower() for text in watched})
        self._folds: OrderedDict[int, _Fold] = OrderedDict()
        self.num_read = 0
        """How many messages were read, for tests of the cost."""

    def read(self, history: Sequence[Message]) -> HistoryFacts:
        """The facts of a history, of which only the messages that are new since the last call are read."""
        facts = self._fold(history).after[len(history) - 1]
        return HistoryFacts(
            has_results=facts.has_results,
            has_system=find_system(history[0], has_any=facts.has_any_system),
            ends_in_result=history[-1]["role"] == "tool",
            is_regular=facts.order.is_complete,
            texts=facts.texts,
            counts=dict(zip(Counted, facts.counts, strict=True)),
        )

    def find_reused_id(self, history: Sequence[Message], ids: Sequence[str]) -> str | None:
        """The first of these call ids that an earlier call has."""
        first_ids = self._fold(history).first_ids
        return next((call_id for call_id in ids if first_ids.get(call_id, len(history) + 1) <= len(history)), None)

    def find_texts(self, message: Message) -> frozenset[str]:
        """Those of the watched texts that occur in a message, in its keys or in its values."""
        if not self._watched:
            return frozenset()
        strings = [text.lower() for text in iterate_texts(message)]
        return frozenset(watched for watched in self._watched if any(watched in text for text in strings))

    def _fold(self, history: Sequence[Message]) -> _Fold:
        """The fold of the history, or of a longer one that it begins."""
        known = (fold for message in reversed(history) if (fold := self._folds.get(id(message))) is not None)
        fold = next(known, None) or _Fold()
        if fold.count_known(history) < min(len(fold.messages), len(history)):
            fold = _Fold()
        if fold.messages:
            self._folds.pop(id(fold.messages[-1]), None)
        for message in history[len(fold.messages) :]:
            self._add(fold, message)
        self._folds[id(fold.messages[-1])] = fold
        if len(self._folds) > _MAX_FOLDS:
            self._folds.popitem(last=False)
        return fold

    def _add(self, fold: _Fold, message: Message) -> None:
        self.num_read += 1
        role, calls = message["role"], message.get("tool_calls") or ()
        before = fold.after[-1] if fold.after else _FactsSoFar()
        added = (len(calls), 1, role == "user", role == "tool", role == "assistant")
        fold.messages.append(message)
        fold.contents.append(message.get("content"))
        fold.after.append(
            _FactsSoFar(
                has_results=before.has_results or role == "tool",
                has_any_system=before.has_any_system or role == "system",
                order=before.order.add(message),
                texts=before.texts | self.find_texts(message),
                counts=tuple(a + b for a, b in zip(before.counts, added, strict=True)),
            )
        )
        for call in calls:
            fold.first_ids.setdefault(str(call.get("id") or ""), len(fold.messages))
