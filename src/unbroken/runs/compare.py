"""`unbroken verify RUN --against OTHER`: two runs, step by step, until the first id or number that differs.

Only their files are read, so numerics may be fast. Steps are read from the first on, and none is left out: two runs may
differ at one step and agree again later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.runs.diagnosis.evidence import Numbers, read_steps
from unbroken.runs.folder import may_change, read_recipe
from unbroken.runs.records.files import FOLDER, find_records
from unbroken.runs.records.recorded import RecordedStep, read_step

_MEASURED = (
    "seconds/", "idle/", "memory/", "tokens_per_s/", "outages/", "weights/", "sampler/", "judge/", "step",
    "rollout/num_tool_calls", "rollout/prompt_tokens",
)  # fmt: skip
"""Metrics of the machine; and of what records do not give back: calls, prompts that were not answered, and what reward
functions counted."""
_OF_ROW = ("policy_versions", "temperature", "is_trained", "loss", "advantages", "trainer_logprobs")
"""Keys of a row that are compared after its ids and their logprobs."""
_OF_SCORED_ROW = ("trainer_logprobs",)
"""Those of them that are null in rows that a run did not score (`rollout_log.scored_groups`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunComparison:
    """How far two runs are the same."""

    num_equal: int
    """Steps before the first that differs."""
    settings: tuple[str, ...]
    """Settings that differ, of those that affect what a step trains on."""
    difference: str | None
    """What differs first; None if all steps are equal."""

    def describe(self, folder: Path, other: Path) -> str:
        """The report, for a terminal."""
        lines = [f"{folder} and {other}: {self.num_equal} steps are equal from the first on"]
        lines += [f"  setting: {each}" for each in self.settings]
        lines.append(f"  first difference: {self.difference}" if self.difference else "  no difference")
        return "\n".join(lines)


def compare_runs(folder: Path, other: Path) -> _RunComparison:
    """Compare two runs; raises `InvalidInputError` if a folder is no run's, or a file of it is damaged."""
    folders = folder, other
    settings = tuple(_compare_settings(*(read_recipe(each).settings for each in folders)))
    files = [find_records(each / FOLDER) for each in folders]
    for each, found in zip(folders, files, strict=True):
        if not found:
            raise InvalidInputError(f"{each / FOLDER} must have the rollouts of the run (rollout_log.groups), got none")
    metrics = [{int(line["step"]): line for line in read_steps(each)} for each in folders]
    equal: set[int] = set()
    with_files = files[0].keys() | files[1].keys()
    # Of a step that no run has a file of, the metrics alone are compared.
    without = {(step, 0) for step in metrics[0].keys() | metrics[1].keys()} - {(step, 0) for step, _ in with_files}
    for step, rank in sorted(with_files | without):
        paths = [found.get((step, rank)) for found in files]
        lines = [found.get(step, {}) for found in metrics]
        if (difference := _compare_step(step, paths, lines, folders)) is not None:
            return _RunComparison(num_equal=len(equal - {step}), settings=settings, difference=difference)
        equal.add(step)
    return _RunComparison(num_equal=len(equal), settings=settings, difference=None)


def _compare_settings(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*own, *other]):
        if not may_change(name) and own.get(name) != other.get(name):
            yield f"{name} is {own.get(name)!r} and {other.get(name)!r}"


def compare_metrics(recorded: Numbers, again: Numbers) -> list[str]:
    """The metrics that differ, of those that follow from rows."""
    names = [name for name in dict.fromkeys([*recorded, *again]) if not name.startswith(_MEASURED)]
    return [
        f"{name} is {recorded.get(name)!r}, and {again.get(name)!r}"
        for name in names
        if recorded.get(name) != again.get(name)
    ]


def _compare_step(
    step: int, paths: Sequence[Path | None], metrics: Sequence[Numbers], folders: Sequence[Path]
) -> str | None:
    """What differs first in a step of two runs, with what is known of its cause."""
    own, other = paths
    if own is None and other is None:
        if not all(metrics):
            return f"step {step}: only {folders[1 if metrics[1] else 0]} has its line in metrics.jsonl"
        changed = compare_metrics(*metrics)
        return f"step {step}, of which no run has rollouts: {changed[0]}" if changed else None
    if own is None or other is None:
        return f"step {step}: only {folders[0] if other is None else folders[1]} has its rollouts"
    steps = [read_step(own), read_step(other)]
    try:
        found = next(_compare_rollouts(*steps), None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"{own} and {other} must have whole records: {type(error).__name__}: {error}"
        ) from error
    if found is not None:
        return f"step {step}, {found}. The weights before the step {_compare_weights(*steps)}"
    if changed := compare_metrics(*metrics):
        return f"step {step}, with equal rollouts: {changed[0]}"
    return None


def _compare_weights(own: RecordedStep, other: RecordedStep) -> str:
    found = [step.head.get("weights") for step in (own, other)]
    if None in found:
        return "have no checksum (trainer.numerics is fast, a GPU, or nothing was trained)"
    return "are the same" if found[0] == found[1] else f"differ: {found[0]} and {found[1]}"


def _compare_rollouts(own: RecordedStep, other: RecordedStep) -> Iterator[str]:
    """What differs in the rollouts of a step: by their places, first what was sampled, then what was made of it."""
    if len(own.records) != len(other.records):
        yield f"{len(own.records)} and {len(other.records)} rollouts"
    pairs = list(zip(own.records, other.records, strict=False))
    for compare in (_compare_samples, _compare_training):
        for record, theirs in pairs:
            yield from (f"trajectory {record['trajectory']}{found}" for found in compare(record, theirs))


def _compare_samples(record: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for number, rows in enumerate(itertools.zip_longest(record["rows"], other["rows"])):
        yield from (f", row {number}: {found}" for found in _compare_sampled(*rows))
    for key in ("status", "reward"):
        if record[key] != other[key]:
            yield f": {key} is {record[key]!r} and {other[key]!r}"


def _compare_training(record: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for number, (row, theirs) in enumerate(zip(record["rows"], other["rows"], strict=False)):
        for key in _OF_ROW:
            own, other_value = row.get(key), theirs.get(key)
            is_in_both = key not in _OF_SCORED_ROW or None not in (own, other_value)
            if is_in_both and own != other_value:
                yield f", row {number}: {key} differs"


def _compare_sampled(row: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Iterator[str]:
    """The first id of a row that differs, or the first whose logprob does, whichever comes first."""
    if row is None or other is None:
        yield f"only {'the second' if row is None else 'the first'} run has it"
        return
    logprobs = [dict(zip(find_sampled(each), each["rollout_logprobs"], strict=False)) for each in (row, other)]
    for place, (own, theirs) in enumerate(itertools.zip_longest(row["token_ids"], other["token_ids"])):
        if own != theirs:
            yield f"position {place}: id {own} and {theirs}"
            return
        if logprobs[0].get(place) != logprobs[1].get(place):
            yield f"position {place}, id {own}: logprob {logprobs[0].get(place)!r} and {logprobs[1].get(place)!r}"
            return


def find_sampled(row: Mapping[str, Any]) -> list[int]:
    """The positions of a recorded row's sampled ids: each has the version that sampled it."""
    return [place for start, stop, _ in row["policy_versions"] for place in range(start, stop)]
