"""What a step's files hold: a short line for each rollout, and one rollout with all of its ids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.runs.records.files import read_records

MAX_TEXT = 8000
"""Characters of a rollout's messages that a search looks at."""
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
        for number, path in enumerate(self.paths):
            try:
                for line, record in enumerate(read_records(path)):
                    if record.get("kind") == "step":
                        heads.append(record)
                    elif record.get("kind") == "trajectory":
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
