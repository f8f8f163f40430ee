"""What a step's files hold: a short line for each rollout, and one rollout with all of its ids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, ValidationError

from unbroken.errors import InvalidInputError
from unbroken.runs.records.files import FORMAT, parse_line, read_lines

MAX_TEXT = 8000
"""Characters of a rollout's messages that a search looks at."""
BROKEN = "broken"
"""The status of a rollout whose record cannot be read."""
_MAX_BROKEN = 1000
_MAX_ERROR = 2000
_NO_TEXT = frozenset({"role", "type", "sha256", "id", "tool_call_id"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The files of one step, of all processes."""

    step: int
    paths: tuple[Path, ...]
    """By rank."""

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
                        heads.append(read_head(path, data))
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
            "step": self.step,
            "heads": heads,
            "trajectories": trajectories,
            "problems": problems,
            "max_text": MAX_TEXT,
        }


def read_head(path: Path, line: bytes) -> dict[str, Any]:
    """Read the first line of a file; raises `InvalidInputError` if it is not the line of a step."""
    try:
        head = parse_line(line)
        if head.get("format") != FORMAT:
            raise InvalidInputError(f"it must have the format {FORMAT}, got {head.get('format')!r}")
        _check(_Head, head)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} must be a file of rollouts: line 0: {error}") from None
    return head


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
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


_Span = Annotated[list[float], Len(2, 3)]
_SPANS = ("message_indices", "policy_versions", "loss", "clipped", "corrected", "advantages")


class _Head(_Shape):
    kind: Literal["step"]
    rank: int
    policy_version: int | None
    model: str | None
    num_kept: int | None = None
    num_groups: int | None = None


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
    tools: Sequence[Any] | None = None
    messages: Annotated[list[_Message], Len(0, 20_000)]
    turns: Annotated[list[_Turn], Len(0, 20_000)]
    rows: Annotated[list[_Row], Len(0, 1000)]


def summarize(record: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a rollout."""
    turns, rows = record.get("turns") or [], record.get("rows") or []
    text = join_texts(record.get("messages") or [])
    statuses = [status for turn in turns for status in turn.get("call_statuses") or ()]
    failures = {name: n for name, n in (record.get("counters") or {}).items() if name.startswith("tool_errors/")}
    return {
        "group": record.get("group"),
        "trajectory": record.get("trajectory"),
        "status": record.get("status"),
        "error": record.get("error"),
        "reward": record.get("reward"),
        "reward_parts": record.get("reward_parts") or {},
        "wall_time_s": record.get("wall_time_s"),
        "num_turns": len(turns),
        "num_rows": len(rows),
        "num_ids": max((len(row["token_ids"]) for row in rows), default=0),
        "num_sampled": sum(turn.get("num_sampled") or 0 for turn in turns),
        "is_truncated": any(turn.get("finish_reason") == "length" or turn.get("cut_by") for turn in turns),
        "is_trained": any(row.get("is_trained") for row in rows),
        "forks": [turn["fork"] for turn in turns if turn.get("fork")],
        "refusals": [turn["refusal"] for turn in turns if turn.get("refusal")],
        "num_bad_calls": sum(status != "ok" for status in statuses),
        "num_tool_errors": sum(failures.values()),
        "advantage": _find_advantage(rows),
        "versions": _find_versions(rows),
        **_measure_mismatch(rows),
        "text": text[:MAX_TEXT],
        "is_text_cut": len(text) > MAX_TEXT,
    }


def _find_advantage(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean advantage of the ids in the loss."""
    spans = [span for row in rows for span in row.get("advantages") or ()]
    num_ids = sum(stop - start for start, stop, _ in spans)
    return sum((stop - start) * value for start, stop, value in spans) / num_ids if num_ids else None


def _find_versions(rows: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The first and the last policy version that sampled."""
    versions = [version for row in rows for _, _, version in row.get("policy_versions") or ()]
    return [min(versions), max(versions)] if versions else None


def _measure_mismatch(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """k3 and the largest difference of the trainer's and the sampler's logprobs, of all sampled ids."""
    differences = [
        trainer - sampler
        for row in rows
        for trainer, sampler in zip(row.get("trainer_logprobs") or (), row.get("rollout_logprobs") or (), strict=False)
    ]
    if not differences:
        return {"k3": None, "max_abs": None}
    ratios = (min(difference, 50.0) for difference in differences)
    k3 = sum(math.expm1(ratio) - ratio for ratio in ratios) / len(differences)
    return {"k3": k3, "max_abs": max(map(abs, differences))}


def join_texts(messages: Sequence[Mapping[str, Any]]) -> str:
    """All text of messages, to be searched."""
    return "\n".join(text for message in messages for text in _find_texts(message))


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _NO_TEXT:
                yield from _find_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_texts(item)
