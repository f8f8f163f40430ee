"""A recorded rollout: read and checked, as a line of a list, and how its parts belong together on a page.

Parts are nodes and turns, messages and turns, branches and their forks. Worked example: the rows 1 2 3 4 and 1 2 5 6 of
a rollout fork at position 2; the ids there are 3 and 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import numpy as np
from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.retokenising.records import match_turns
from unbroken.runs.records.files import MAX_TEXT, PART, parse_line, read_lines, summarize
from unbroken.runs.records.notes import hash_line
from unbroken.types.arrays import count_common_prefix
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
                lines = enumerate(read_lines(path))
                for line, data in lines:
                    if line == 0:
                        head, columns = _read_head(path, data)
                        heads.append(head)
                        if columns is None:
                            continue
                        columns["text"] = _read_texts(path, next(lines, (1, b""))[1], len(columns["status"]))
                        for k, values in enumerate(zip(*columns.values(), strict=True), start=2):
                            place = {"index": len(trajectories), "file": number, "line": k}
                            trajectories.append(place | dict(zip(columns, values, strict=True)))
                        break
                    record = read_trajectory(data, line)
                    num_broken += record["status"] == BROKEN
                    if num_broken > _MAX_BROKEN:
                        raise InvalidInputError(f"{path} has more than {_MAX_BROKEN} broken lines: no more are read")
                    place = {"index": len(trajectories), "file": number, "line": line}
                    trajectories.append(place | summarize(record))
            except InvalidInputError as error:
                problems.append(str(error))
        found = {"heads": heads, "trajectories": trajectories, "problems": problems}
        return {"step": self.name, **found, "max_text": MAX_TEXT}

    def read_columns(self) -> tuple[dict[str, list[Any]], list[str], list[str] | None]:
        """The columns of `_read_head`, what is wrong, and the texts where they had to be read for it."""
        try:
            found = [columns for path in self.paths if (columns := _read_head(path, next(read_lines(path), b""))[1])]
        except InvalidInputError:
            found = []
        if len(found) == len(self.paths):
            return _join_columns(found), [], None
        summary = self.make_summary()
        members = summary["trajectories"]
        parts = dict.fromkeys(key for each in members for key in each if key.startswith(PART))
        columns = {key: [each.get(key) for each in members] for key in (*_Columns.model_fields, *parts, "text")}
        del columns["parts"]
        return columns, summary["problems"], columns.pop("text")

    def read_texts(self) -> list[str]:
        """The texts of the rollouts that a search looks at; none if one of the files has not all."""
        with suppress(InvalidInputError):
            found = (_read_texts(path, next(itertools.islice(read_lines(path), 1, None), b"")) for path in self.paths)
            return list(itertools.chain.from_iterable(found))
        return []


def _join_columns(columns: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The columns of several files as one; where one of them has no such column, each rollout has None."""
    if len(columns) == 1:
        return columns[0]
    sized = [(each, [None] * len(each["status"])) for each in columns]
    keys = dict.fromkeys(itertools.chain(*columns))
    return {key: [*itertools.chain(*(each.get(key, gap) for each, gap in sized))] for key in keys}


def _read_head(path: Path, line: bytes) -> tuple[dict[str, Any], dict[str, list[Any]] | None]:
    """Read the first line of a file, and the columns in it; raises `InvalidInputError` if it is not the line of a step.

    There is a column for each field of `_Columns` but `parts`, and for each of these. Pydantic reads and checks them at
    once, faster than `parse_line` and a check.
    """
    try:
        found = _Head.model_validate_json(line)
        head = {**vars(found), **(found.model_extra or {})}
        columns = head.pop("columns")
        check_json(head)
        if columns is None:  # of more rollouts than are listed at the head of a file
            return head, None
        named = vars(columns)
        named |= {f"{PART}{name}": part for name, part in named.pop("parts").items()}
        if len(set(map(len, named.values()))) > 1:
            raise InvalidInputError("columns must have the same length")
    except (ValidationError, InvalidInputError) as error:
        raise InvalidInputError(f"{path} must be a file of rollouts: line 0: {_describe(error)}") from None
    return head, named


def _read_texts(path: Path, line: bytes, number: int | None = None) -> list[str]:
    """Read the line of texts, of which there are `number`."""
    try:
        texts = _Texts.model_validate_json(line).texts
        if number not in (None, len(texts)):
            raise InvalidInputError(f"it must have {number} texts, got {len(texts)}")
    except (ValidationError, InvalidInputError) as error:
        raise InvalidInputError(f"{path} must be a file of rollouts: line 1: {_describe(error)}") from None
    return texts


def read_pair(path: Path, number: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Read the first line of a file, and the rollout of line `number` with its hash; those between are not parsed.

    Raises:
        InvalidInputError: it is no file of rollouts, or has no such line.
    """
    lines = read_lines(path)
    head, _ = _read_head(path, next(lines, b""))
    line = next(itertools.islice(lines, number - 1, None), None)
    if line is None:
        raise InvalidInputError(f"{path} has no line {number} of a trajectory")
    return head, read_trajectory(line, number), hash_line(line)


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
        "kind": "trajectory", "trajectory": name, "group": None, "status": BROKEN,
        "error": f"the record cannot be read: {error}"[:_MAX_ERROR], "messages": [], "turns": [], "rows": [],
    }  # fmt: skip


def check_record(record: Mapping[str, Any]) -> None:
    """Check that a rollout has all that pages and their scripts rely on.

    Raises:
        InvalidInputError: a field has another type, or a span leaves the ids.
    """
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        raise InvalidInputError(_describe(error)) from None
    for number, row in enumerate(record["rows"]):
        _check_row(f"rows.{number}", row, num_messages=len(record["messages"]))


def _check_row(name: str, row: Mapping[str, Any], *, num_messages: int) -> None:
    ids, messages = row["token_ids"], row.get("messages") or ()
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise InvalidInputError(f"{name}.token_ids must be from 0 to {2**31 - 1}")
    if messages and not 0 <= min(messages) <= max(messages) < num_messages:
        raise InvalidInputError(f"{name}.messages must be places in messages, got {messages!r:.100}")
    for start, stop in _list_spans(row):
        if not 0 <= start <= stop <= len(ids):
            raise InvalidInputError(f"{name} has the span {start} to {stop} of {len(ids)} ids")


def _list_spans(row: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Start and stop of everything in a row that is about some of its ids."""
    spans = [(each["start"], each["stop"]) for each in (*row["segments"], *row["images"])]
    return spans + [tuple(span[:2]) for kind in _SPANS for span in row.get(kind) or ()]


def _describe(error: ValidationError | InvalidInputError) -> str:
    """The first thing that is wrong; the format before what a later one may have otherwise."""
    if isinstance(error, InvalidInputError):
        return str(error)
    errors = error.errors(include_url=False, include_input=False)
    first = min(errors, key=lambda each: each["loc"] != ("format",))
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Columns(_Shape):
    """What lists show of rollouts, where the first line of their file has that."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    group: list[str | None]
    trajectory: list[str]
    status: list[str]
    error: list[str | None]
    reward: list[float | None]
    parts: dict[str, list[float | None]]
    wall_time_s: list[float | None]
    prompt: list[str | None]
    problem: list[str]
    expected: list[str | None]
    given: list[str | None]
    num_turns: list[_Count]
    num_rows: list[_Count]
    num_sampled: list[_Count]
    is_truncated: list[bool]
    is_trained: list[bool]
    forks: list[tuple[str, ...]]
    num_bad_calls: list[_Count]
    num_tool_errors: list[_Count]
    advantage: list[float | None]
    max_abs: list[float | None]
    is_text_cut: list[bool]


class _Texts(_Shape):
    kind: Literal["texts"]
    texts: list[str]


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
    columns: _Columns | None = None


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
    tools: Sequence[Any] | None = None


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
    num_given: int = 0
    controls: dict[str, Any] | None = None
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
    policy: str | None = None
    policy_versions: list[_Span] | None = None


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
        turn_of_message = _match_messages(record.get("messages") or [], turns)
    return {
        "turn_of_node": turn_of_node,
        "turn_of_message": turn_of_message,
        "forks": find_forks(rows, turns, turn_of_node),
        **_describe_ids({token_id for row in rows for token_id in row["token_ids"]}, texts),
    }


def _describe_ids(ids: set[int], texts: TokenTexts | None) -> dict[str, Any]:
    """The texts of ids, and the bytes of those that are a part of a character."""
    found = {} if texts is None else texts.get_all(ids)
    return {
        "texts": {token_id: text.text for token_id, text in found.items()},
        "bytes": {token_id: text.data.hex(" ") for token_id, text in found.items() if "\ufffd" in text.text},
    }


def _match_messages(messages: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> dict[int, int]:
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
        shared = [count_common_prefix(arrays[number], earlier) for earlier in arrays[:number]]
        parent = int(np.argmax(shared))
        position = shared[parent]
        turn = _find_turn(rows[number], position, turn_of_node)
        reason = None if turn is None else _find_reason(turns[turn], rows[number], position)
        ids = [_id_at(arrays[parent], position), _id_at(arrays[number], position)]
        place = {"row": number, "parent_row": parent, "position": position, "turn": turn}
        forks.append({**place, "reason": reason, "ids": ids})
    return forks


def _find_reason(turn: Mapping[str, Any], row: Mapping[str, Any], position: int) -> str | None:
    """Why the turn forked; where it did not, as an agent may begin anew anywhere, what it began with."""
    if (reason := turn.get("fork") or turn.get("branch")) is not None:
        return str(reason)
    origins = [each["origin"] for each in row["segments"] if each["start"] <= position < each["stop"]]
    return _BRANCHES.get(origins[0]) if origins else None


def _find_turn(row: Mapping[str, Any], position: int, turn_of_node: Mapping[int, int]) -> int | None:
    """The turn of the first sampled ids at a position or after it."""
    for segment in row["segments"]:
        if segment["origin"] == "sampled" and segment["stop"] > position:
            return turn_of_node.get(segment["node"])
    return None


def _id_at(token_ids: np.ndarray[Any, Any], position: int) -> int | None:
    return int(token_ids[position]) if position < len(token_ids) else None
