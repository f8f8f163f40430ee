"""All rollouts of a run as one table: filtered, sorted and searched here, by the query that is in the page's URL.

q=cannot&reward=..0.5&is=failed&sort=-ids&size=100     the longest 100 of the failed ones with this text, reward <= 0.5
"""

from __future__ import annotations

import itertools
import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from unbroken.runs.records.files import PART
from unbroken.runs.records.notes import Note
from unbroken.viewer.sources.rollouts import StepFiles

_FIRST_S, _MAX_S = 0.05, 1.0
"""Seconds for which files are read before the first answer, and before each further one."""
_COLUMNS = {
    "reward": "reward", "ids": "num_sampled", "turns": "num_turns", "mismatch": "max_abs", "time": "wall_time_s",
    "advantage": "advantage", "truncated": "is_truncated", "parse": "num_bad_calls", "tools": "num_tool_errors",
}  # fmt: skip
"""Columns by their names in a query; there are also `step`, `part:NAME`, and three flags."""
_FLAGS = ("truncated", "failed", "forked", "parse", "tools", "untrained")
_FAILED = ("failed", "aborted", "timeout")
_TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """The rollouts of a step or an evaluation, when its files were as `signature` says."""

    files: StepFiles
    signature: object
    columns: Mapping[str, list[Any]]
    problems: Sequence[str]


class Table:
    """The N rollouts of the steps that were read. Their texts are in a file without a name, in lower case."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the run is looked at
        finalize(self, self._file.close)
        self._lock = Lock()
        self._known: dict[int | str, _Step] = {}
        self._texts: dict[int | str, tuple[int, int]] = {}
        """Where those of a step begin in the file, and their bytes."""
        self._steps: list[_Step] | None = None
        """The steps that the rest is about, one after the other."""
        self._starts = [0]
        self._values: dict[str, NDArray[np.float64]] = {}
        self._offers: dict[str, Any] = {}

    def query(
        self,
        files: Mapping[int | str, tuple[StepFiles, object]],
        query: str | None,
        notes: Mapping[int | str, Mapping[int, Note]],
    ) -> dict[str, Any]:
        """The first rollouts of a query, how many there are, and what there is to choose by; None: all of them.

        `files` has the files of each step and their signature; new ones are read for as long as an answer may take.
        `notes` has those of each step that has any, by the index of their rollouts.
        """
        asked = dict(parse_qsl(query or ""))
        text, size = asked.get("q", ""), asked.get("size", "")
        with self._lock:
            end = inf if query is None else monotonic() + (_MAX_S if self._known else _FIRST_S)
            num_read = sum(self._read(name, *each, end, with_texts=bool(text)) for name, each in files.items())
            self._join([self._known[name] for name in files if name in self._known])
            chosen = self._choose(asked, notes)
            if text:
                chosen &= self._find(text)
            places = self._sort(np.flatnonzero(chosen), asked.get("sort", ""))
            shown = places[: int(size) if size.isdecimal() else None].tolist()
            return {
                "rows": [self._make_row(place, is_whole=query is None) for place in shown],
                "num_found": len(places),
                "num_all": len(chosen),
                "reward": self._describe_rewards(places),
                "offers": self._offers,
                "num_read": num_read,
                "num_steps": len(files),
                "problems": [problem for each in self._steps or () for problem in each.problems][:5],
            }

    def _describe_rewards(self, places: NDArray[np.intp]) -> list[float] | None:
        """The mean and the standard deviation of the rewards of these rollouts; None if there is none."""
        rewards = self._get("reward")[places]
        rewards = rewards[~np.isnan(rewards)]
        if not len(rewards):
            return None
        with np.errstate(all="ignore"):  # a damaged file may have 1e308, and the mean is infinite
            described = [float(rewards.mean()), float(rewards.std())]
        return described if all(map(isfinite, described)) else None

    def _read(self, name: int | str, files: StepFiles, signature: object, end: float, *, with_texts: bool) -> bool:
        """Read a step if it is new and there is time; returns whether all of it that is asked for is known."""
        is_known = name in self._known and self._known[name].signature == signature
        if is_known and (name in self._texts or not with_texts):
            return True
        if monotonic() > end:
            return False
        texts = None
        if not is_known:
            columns, problems, texts = files.read_columns()
            self._known[name] = _Step(files=files, signature=signature, columns=columns, problems=problems)
            self._texts.pop(name, None)
        if texts is not None or with_texts:
            lines = [each.lower().replace("\0", " ") for each in texts or files.read_texts()]
            packed = "\0".join(lines).encode("utf-8", "replace")
            self._texts[name] = self._file.seek(0, os.SEEK_END), len(packed)
            self._file.write(packed)
            self._file.flush()
        return True

    def _join(self, steps: list[_Step]) -> None:
        """Put steps one after the other, and see what there is to choose by."""
        if steps == self._steps:
            return
        self._steps = steps
        self._starts = list(itertools.accumulate((len(each.columns["status"]) for each in steps), initial=0))
        self._values = {}
        self._offers = self._make_offers(steps)

    def _make_offers(self, steps: list[_Step]) -> dict[str, Any]:
        """What there is to choose by."""
        parts = {key for each in steps for key in each.columns if key.startswith(PART)}
        forks = Counter(reason for reasons in self._chain("forks") for reason in set(reasons or ()))
        return {
            "statuses": sorted(set(self._chain("status"))),
            "sets": sorted({each.files.set or _TRAINING for each in steps}),
            "forks": sorted(forks.items()),
            "parts": sorted(name.removeprefix(PART) for name in parts),
            "flags": {name: int(np.count_nonzero(self._get(name))) for name in _FLAGS},
        }

    def _chain(self, column: str) -> Iterator[Any]:
        return itertools.chain.from_iterable(each.columns[column] for each in self._steps or ())

    def _get(self, name: str) -> NDArray[np.float64]:
        """Numbers by their name in a query, NaN for those without one, or a flag, which is true if it is not 0; [N]."""
        if name not in self._values:
            found = itertools.chain.from_iterable(_list_values(each, name) for each in self._steps or ())
            self._values[name] = np.array([*found], dtype=float)
        return self._values[name]

    def _choose(self, asked: Mapping[str, str], notes: Mapping[int | str, Mapping[int, Note]]) -> NDArray[np.bool_]:
        """Which rollouts have all that is asked for but the text, [N]."""
        chosen = self._choose_by_numbers(asked)
        flags = {*asked.get("is", "").split(","), "variance" if asked.get("variance") == "1" else ""}
        for name in flags.intersection((*_FLAGS, "variance")):
            chosen &= self._get(name) > 0
        for name in ("status", "problem"):
            if wanted := asked.get(name):
                chosen &= np.array([each == wanted for each in self._chain(name)], dtype=bool)
        if fork := asked.get("fork"):
            chosen &= np.array([fork in each for each in self._chain("forks")], dtype=bool)
        if label := asked.get("label"):
            chosen &= self._choose_labelled(label, notes)
        if chosen_set := asked.get("set"):
            own = [(each.files.set or _TRAINING) == chosen_set for each in self._steps or ()]
            chosen &= np.repeat(np.array(own, dtype=bool), np.diff(self._starts))
        return chosen

    def _choose_labelled(self, label: str, notes: Mapping[int | str, Mapping[int, Note]]) -> NDArray[np.bool_]:
        """Which rollouts have a label, [N]."""
        chosen = np.zeros(self._starts[-1], dtype=bool)
        for step, (start, stop) in zip(self._steps or (), itertools.pairwise(self._starts), strict=True):
            for index, note in notes.get(step.files.name, {}).items():
                if label in note.labels and start + index < stop:
                    chosen[start + index] = True
        return chosen

    def _choose_by_numbers(self, asked: Mapping[str, str]) -> NDArray[np.bool_]:
        """Which rollouts are in all ranges `LOW..HIGH` that are asked for, [N]; either end may be left out."""
        chosen = np.ones(self._starts[-1], dtype=bool)
        ranges = {"reward": "reward", "ids": "ids", "step": "step"}
        if "part" in asked:
            ranges[f"{PART}{asked['part']}"] = "value"
        for column, name in ranges.items():
            low, high = (_to_number(asked.get(name, "").split("..")[n]) for n in (0, -1))
            if low is not None:
                chosen &= self._get(column) >= low
            if high is not None:
                chosen &= self._get(column) <= high
        if (least := _to_number(asked.get("mismatch", "").split("..")[0])) is not None:
            chosen &= self._get("mismatch") > least
        return chosen

    def _find(self, text: str) -> NDArray[np.bool_]:
        """Which rollouts have a text in any case, [N]."""
        wanted = text.lower().encode("utf-8", "replace")
        found = np.zeros(self._starts[-1], dtype=bool)
        for each, (first, stop) in zip(self._steps or (), itertools.pairwise(self._starts), strict=True):
            start, size = self._texts.get(each.files.name, (0, 0))
            data = os.pread(self._file.fileno(), size, start)
            if wanted in data:
                lines = data.split(b"\0")[: stop - first]  # of a damaged file there may be more texts than rollouts
                found[first : first + len(lines)] = [wanted in line for line in lines]
        return found

    def _sort(self, places: NDArray[np.intp], order: str) -> NDArray[np.intp]:
        """Sort rollouts by `COLUMN`, or `-COLUMN` for the largest first; those without a number are the last."""
        name = order.removeprefix("-")
        if name not in (*_COLUMNS, "step") and not name.startswith(PART):
            return places
        values = self._get(name)[places]
        return places[np.argsort(-values if order.startswith("-") else values, kind="stable")]

    def _make_row(self, place: int, *, is_whole: bool) -> dict[str, Any]:
        number = bisect_right(self._starts, place) - 1
        step, index = (self._steps or [])[number], place - self._starts[number]
        row = {key: each[index] for key, each in step.columns.items()}
        if is_whole:  # who filters it has no groups
            row["varies"] = bool(self._get("variance")[place])
        return {**row, "step": step.files.name, "number": step.files.step, "set": step.files.set or "", "index": index}


def _list_values(step: _Step, name: str) -> Iterable[Any]:
    """What is compared of a step's rollouts, by its name in a query."""
    if name in _DERIVED:
        return _DERIVED[name](step)
    return step.columns.get(_COLUMNS.get(name, name)) or [None] * len(step.columns["status"])


def _list_steps(step: _Step) -> Iterable[int]:
    return [step.files.step] * len(step.columns["status"])


def _list_failed(step: _Step) -> Iterable[bool]:
    ends = zip(step.columns["status"], step.columns["error"], strict=True)
    return (error is not None or status in _FAILED for status, error in ends)


def _list_forked(step: _Step) -> Iterable[bool]:
    pairs = zip(step.columns["num_rows"], step.columns["forks"], strict=True)
    return (num_rows > 1 or bool(forks) for num_rows, forks in pairs)


def _list_untrained(step: _Step) -> Iterable[bool]:
    return (not each and step.files.set is None for each in step.columns["is_trained"])


def _list_varied(step: _Step) -> Iterable[bool]:
    varied = _find_varied_groups(step.columns["group"], step.columns["reward"])
    return (group in varied for group in step.columns["group"])


_DERIVED: Mapping[str, Callable[[_Step], Iterable[Any]]] = {
    "step": _list_steps,
    "failed": _list_failed,
    "forked": _list_forked,
    "untrained": _list_untrained,
    "variance": _list_varied,
}
"""What a query may compare besides columns, by its name there."""


def _find_varied_groups(groups: Iterable[Any], rewards: Iterable[float | None]) -> set[Any]:
    """The groups whose rewards differ; a rollout without one says nothing about its group."""
    firsts: dict[Any, float] = {}
    pairs = ((group, reward) for group, reward in zip(groups, rewards, strict=True) if reward is not None)
    return {group for group, reward in pairs if firsts.setdefault(group, reward) != reward}


def _to_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
