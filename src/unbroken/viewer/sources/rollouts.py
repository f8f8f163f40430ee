"""A recorded rollout: read and checked, as a line of a list, and how its parts belong together on a page.

Parts are nodes and turns, messages and turns, branches and their forks. Worked example: the rows 1 2 3 4 and 1 2 5 6 of
a rollout fork at position 2; the ids there are 3 and 5.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal
from urllib.parse import quote
from weakref import finalize

import numpy as np
from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.runs.records.files import MAX_TEXT, parse_line, read_lines, summarize
from unbroken.untrusted import check_json

BROKEN = "broken"
"""The status of a rollout whose record cannot be read."""
_MAX_BROKEN = 1000
_MAX_ERROR = 2000
_Span = Annotated[list[float], Len(2, 3)]
_SPANS = ("message_indices", "policy_versions", "loss", "clipped", "corrected", "advantages")
_BRANCHES = {"prompt": "new_conversation", "bridge": "continued_again", "sampled": "sampled_again"}
"""Branches without a fork, by the origin of their first own id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The files of one step, of all processes."""

    step: int
    set: str | None = None
    """The evaluated set; None for the rollouts of a step of training."""
    paths: tuple[Path, ...]
    """By rank."""

    @property
    def name(self) -> int | str:
        """What stands for the step in paths."""
        return self.step if self.set is None else f"{self.step}@{quote(self.set, safe='')}"

    def make_summary(self) -> dict[str, Any]:
        """What there is to choose from: each process's first line, and a line for each rollout of them."""
        heads: list[dict[str, Any]] = []
        trajectories: list[dict[str, Any]] = []
        problems: list[str] = []
        num_broken = 0
        for number, path in enumerate(self.paths):
            try:
                for line, data in enumerate(read_lines(path)):
                    if line == 0:
                        head = read_head(path, data)
                        summaries = head.pop("summaries", None)
                        heads.append(head)
                        if summaries is not None:
                            places = ({"index": len(trajectories) + k, "file": number, "line": k + 1} for k in count())
                            trajectories += [place | each for place, each in zip(places, summaries, strict=False)]
                            break
                        continue
                    record = read_trajectory(data, line)
                    num_broken += record["status"] == BROKEN
                    if num_broken > _MAX_BROKEN:
                        raise InvalidInputError(f"{path} has more than {_MAX_BROKEN} broken lines: no more are read")
                    place = {"index": len(trajectories), "file": number, "line": line}
                    trajectories.append(place | summarize(record))
            except InvalidInputError as error:
                problems.append(str(error))
        return {
            "step": self.name,
            "heads": heads,
            "trajectories": trajectories,
            "problems": problems,
            "max_text": MAX_TEXT,
        }


_COLUMNS = (
    *("index", "group", "trajectory", "status", "reward", "reward_parts", "expected", "given", "num_turns", "num_rows"),
    *("num_sampled", "is_truncated", "is_trained", "forks", "num_bad_calls", "num_tool_errors", "advantage", "max_abs"),
    "wall_time_s",
)


class Lines:
    """The lines of all rollouts of a run for one table, by step, and a search in their texts.

    Texts are in a file without a name, in lower case: a search reads it once and unpacks nothing.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the run is looked at
        finalize(self, self._file.close)
        self._lock = Lock()
        self._lines: dict[int | str, tuple[object, dict[str, Any]]] = {}
        self._texts: dict[int | str, tuple[int, array[int]]] = {}
        """Where the texts of a step begin, and each of them in there; the last entry is the end."""

    def get(self, name: int | str, signature: object) -> dict[str, Any] | None:
        """The lines of a step whose files were as `signature` says; None if they were not added."""
        with self._lock:
            known = self._lines.get(name)
        return known[1] if known is not None and known[0] == signature else None

    def add(self, name: int | str, signature: object, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Add a step's lines: a column for each of their keys."""
        members = summary["trajectories"]
        columns: dict[str, list[Any]] = {key: [each.get(key) for each in members] for key in _COLUMNS}
        columns["is_failed"] = [each.get("error") is not None for each in members]
        lines = {"step": name, "columns": columns, "problems": summary["problems"]}
        texts = [f"{each['text'].lower()}\0".encode("utf-8", "replace") for each in members]
        with self._lock:
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(b"".join(texts))
            self._file.flush()
            self._texts[name] = (start, array("Q", itertools.accumulate(map(len, texts), initial=0)))
            self._lines[name] = (signature, lines)
        return lines

    def find(self, text: str) -> dict[int | str, list[int]]:
        """The indices of the rollouts of each step that has been added in whose text there is `text` in any case."""
        wanted = text.lower().encode("utf-8", "replace")
        with self._lock:
            places = list(self._texts.items())
        found: dict[int | str, list[int]] = {}
        for name, (start, ends) in places:
            data = os.pread(self._file.fileno(), ends[-1], start)
            position = data.find(wanted)
            while position >= 0:
                index = bisect_right(ends, position) - 1
                found.setdefault(name, []).append(index)
                position = data.find(wanted, ends[index + 1])
        return found


def read_head(path: Path, line: bytes) -> dict[str, Any]:
    """Read the first line of a file; raises `InvalidInputError` if it is not the line of a step.

    It has the lines of all rollouts: pydantic reads and checks JSON at once, faster than `parse_line` and a check.
    """
    try:
        found = _Head.model_validate_json(line)
        head = {**vars(found), **(found.model_extra or {}), "summaries": None}
        check_json(head)
    except ValidationError as error:
        raise InvalidInputError(f"{path} must be a file of rollouts: line 0: {_describe(error)}") from None
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} must be a file of rollouts: line 0: {error}") from None
    return {**head, "summaries": None if found.summaries is None else [vars(each) for each in found.summaries]}


def read_pair(path: Path, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the first line of a file, and the rollout of line `number`; those between are not parsed.

    Raises:
        InvalidInputError: it is no file of rollouts, or has no such line.
    """
    lines = read_lines(path)
    head = read_head(path, next(lines, b""))
    line = next(itertools.islice(lines, number - 1, None), None)
    if line is None:
        raise InvalidInputError(f"{path} has no line {number} of a trajectory")
    return head, read_trajectory(line, number)


def read_trajectory(line: bytes, number: int) -> dict[str, Any]:
    """Read the line of a rollout; one that cannot be read is a record that says so."""
    try:
        record = parse_line(line)
        check_record(record)
    except InvalidInputError as error:
        return make_broken(f"line {number}", error)
    return record


def make_broken(name: str, error: Exception) -> dict[str, Any]:
    """The record of a rollout that cannot be read."""
    return {
        "kind": "trajectory",
        "trajectory": name,
        "group": None,
        "status": BROKEN,
        "error": f"the record cannot be read: {error}"[:_MAX_ERROR],
        "messages": [],
        "turns": [],
        "rows": [],
    }


def check_record(record: Mapping[str, Any]) -> None:
    """Check that a rollout has all that pages and their scripts rely on.

    Raises:
        InvalidInputError: a field has another type, or a span leaves the ids.
    """
    _check(_Record, record)
    for number, row in enumerate(record["rows"]):
        ids = row["token_ids"]
        length = len(ids)
        if ids and not 0 <= min(ids) <= max(ids) < 2**31:
            raise InvalidInputError(f"rows.{number}.token_ids must be from 0 to {2**31 - 1}")
        spans = [(each["start"], each["stop"]) for each in (*row["segments"], *row["images"])]
        spans += [tuple(span[:2]) for name in _SPANS for span in row.get(name) or ()]
        for start, stop in spans:
            if not 0 <= start <= stop <= length:
                raise InvalidInputError(f"rows.{number} has the span {start} to {stop} of {length} ids")


def _check(shape: type[_Shape], value: Mapping[str, Any]) -> None:
    try:
        shape.model_validate(value)
    except ValidationError as error:
        raise InvalidInputError(_describe(error)) from None


def _describe(error: ValidationError) -> str:
    """The first thing that is wrong; the format before what a later one may have otherwise."""
    errors = error.errors(include_url=False, include_input=False)
    first = min(errors, key=lambda each: each["loc"] != ("format",))
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Summary(_Shape):
    """What lists show of a rollout, where the first line of its file has that."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    group: str | None
    trajectory: str
    status: str
    error: str | None
    reward: float | None
    reward_parts: dict[str, float | None]
    wall_time_s: float | None
    expected: str | None
    given: str | None
    num_turns: _Count
    num_rows: _Count
    num_ids: _Count
    num_sampled: _Count
    is_truncated: bool
    is_trained: bool
    forks: list[str]
    refusals: list[str]
    num_bad_calls: _Count
    num_tool_errors: _Count
    advantage: float | None
    versions: list[_Count] | None
    k3: float | None
    max_abs: float | None
    text: str
    is_text_cut: bool


class _Head(_Shape):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    kind: Literal["step"]
    format: Literal[1]
    rank: int
    policy_version: int | None
    model: str | None
    num_kept: int | None = None
    num_groups: int | None = None
    num_rollouts: int | None = None
    rewards: Annotated[list[float | None], Len(3, 3)] | None = None
    summaries: list[_Summary] | None = None


class _Segment(_Shape):
    start: int
    stop: int
    origin: str
    node: int


class _Image(_Shape):
    start: int
    stop: int
    sha256: str


class _Row(_Shape):
    token_ids: list[int]
    segments: list[_Segment]
    message_indices: list[_Span]
    rollout_logprobs: list[float]
    trainer_logprobs: list[float] | None = None
    entropies: list[float] | None = None
    ranks: list[int] | None = None
    policy_versions: list[_Span]
    is_trained: bool | None = None
    loss: list[_Span]
    clipped: list[_Span] | None = None
    corrected: list[_Span] | None = None
    advantages: list[_Span]
    images: list[_Image]
    messages: list[int] | None = None


class _Data(_Shape):
    index: int | None = None
    columns: dict[str, Any]


class _Call(_Shape):
    name: str
    status: str
    start_s: float
    stop_s: float


class _Times(_Shape):
    start_s: float
    sampling_s: float
    sampled_s: float
    answered_s: float | None
    calls: list[_Call]


class _Closing(_Shape):
    how: str
    num_ids: int


class _Message(_Shape):
    role: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Turn(_Shape):
    reward: float | None = None
    num_sampled: int
    finish_reason: str
    cut_by: str | None = None
    refusal: str | None = None
    fork: str | None = None
    branch: str | None = None
    message: _Message
    call_statuses: list[str]
    closing: _Closing | None = None
    times: _Times | None = None
    tolerances: Sequence[str] | None = None


class _Record(_Shape):
    """A rollout of docs/rollouts.md, as far as pages read it. What compares all with all has a limit."""

    kind: Literal["trajectory"]
    group: str | None
    trajectory: str
    status: str
    error: str | None = None
    reward: float | None
    reward_parts: dict[str, Any] | None = None
    wall_time_s: float | None = None
    counters: dict[str, int] | None = None
    data: _Data | None = None
    tools: Sequence[Any] | None = None
    messages: Annotated[list[_Message], Len(0, 20_000)]
    turns: Annotated[list[_Turn], Len(0, 20_000)]
    rows: Annotated[list[_Row], Len(0, 1000)]


def describe_trajectory(
    record: Mapping[str, Any],
    texts: TokenTexts | None,
    *,
    turn_of_node: Mapping[int, int] | None = None,
    turn_of_message: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """What a page shows of a rollout beside its record; `texts` has the text of its ids.

    Which turn sampled a node or a message is found by comparing them, unless it is given.
    """
    rows, turns = record.get("rows") or [], record.get("turns") or []
    turn_of_node = match_turns(rows, turns) if turn_of_node is None else turn_of_node
    if turn_of_message is None:
        turn_of_message = match_messages(record.get("messages") or [], turns)
    ids = {token_id for row in rows for token_id in row["token_ids"]}
    found = {} if texts is None else texts.get_all(ids)
    return {
        "turn_of_node": turn_of_node,
        "turn_of_message": turn_of_message,
        "forks": find_forks(rows, turns, turn_of_node),
        "texts": {token_id: text.text for token_id, text in found.items()},
        "bytes": {token_id: text.data.hex(" ") for token_id, text in found.items() if "\ufffd" in text.text},
    }


def match_turns(rows: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The turn that sampled each node. Nodes get their numbers in the order of the turns; not all are in rows.

    Where turns are not in rows, a node has a turn only if its length leaves no other.
    """
    lengths: dict[int, int] = {}
    for row in rows:
        for segment in row["segments"]:
            if segment["origin"] == "sampled":
                node, length = segment["node"], segment["stop"] - segment["start"]
                lengths[node] = max(length, lengths.get(node, 0))
    numbered = [(number, turn["num_sampled"]) for number, turn in enumerate(turns) if turn["num_sampled"]]
    nodes = sorted(lengths.items())
    if len(numbered) == len(nodes):
        return {node: number for (node, _), (number, _) in zip(nodes, numbered, strict=True)}
    first, last = _match_lengths(nodes, numbered), _match_lengths(nodes[::-1], numbered[::-1])
    return {node: number for node, number in first.items() if last.get(node) == number}


def _match_lengths(nodes: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Match nodes and turns of the same length in this order, each as early as possible; {} if a node is left."""
    matched, rest = {}, iter(turns)
    for node, length in nodes:
        found = next((number for number, of_turn in rest if of_turn == length), None)
        if found is None:
            return {}
        matched[node] = found
    return matched


def match_messages(messages: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The turn that sampled each assistant message, where the message is what the turn was read as."""
    matched: dict[int, int] = {}
    first = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        for number in range(first, len(turns)):
            if turns[number].get("message") == message:
                matched[index] = number
                first = number + 1
                break
    return matched


def find_forks(
    rows: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]], turn_of_node: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Where each row leaves the earlier row with which it shares most ids, and why, if the turn says so."""
    arrays = [np.asarray(row["token_ids"], dtype=np.int64) for row in rows]
    forks = []
    for number in range(1, len(rows)):
        shared = [_count_shared(arrays[number], earlier) for earlier in arrays[:number]]
        parent = int(np.argmax(shared))
        position = shared[parent]
        turn = _find_turn(rows[number], position, turn_of_node)
        forks.append(
            {
                "row": number,
                "parent_row": parent,
                "position": position,
                "turn": turn,
                "reason": None if turn is None else _find_reason(turns[turn], rows[number], position),
                "ids": [_id_at(arrays[parent], position), _id_at(arrays[number], position)],
            }
        )
    return forks


def _find_reason(turn: Mapping[str, Any], row: Mapping[str, Any], position: int) -> str | None:
    """Why the turn forked; where it did not, as an agent may begin anew anywhere, what it began with."""
    if (reason := turn.get("fork") or turn.get("branch")) is not None:
        return str(reason)
    origins = [each["origin"] for each in row["segments"] if each["start"] <= position < each["stop"]]
    return _BRANCHES.get(origins[0]) if origins else None


def _count_shared(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> int:
    length = min(len(ours), len(theirs))
    differs = np.flatnonzero(ours[:length] != theirs[:length])
    return int(differs[0]) if len(differs) else length


def _find_turn(row: Mapping[str, Any], position: int, turn_of_node: Mapping[int, int]) -> int | None:
    """The turn of the first sampled ids at a position or after it."""
    for segment in row["segments"]:
        if segment["origin"] == "sampled" and segment["stop"] > position:
            return turn_of_node.get(segment["node"])
    return None


def _id_at(token_ids: np.ndarray[Any, Any], position: int) -> int | None:
    return int(token_ids[position]) if position < len(token_ids) else None
