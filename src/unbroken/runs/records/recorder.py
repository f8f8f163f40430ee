"""Chooses the rollouts of a step that are kept, scores them by the trainer, and writes them; and a table of some."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from unbroken.ledger.export import export_samples, find_trained_paths
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.config import RolloutLogConfig
from unbroken.runs.processes import Rank
from unbroken.runs.records.files import FORMAT, write_records
from unbroken.runs.records.record import RecordedRow, find_images, make_record
from unbroken.training.model.row_scores import RowScores
from unbroken.training.observer import StepRollouts
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

_T = TypeVar("_T")


class TrainedRows:
    """The rows that a step trains on, to be found by the ids and logprobs that were sampled."""

    def __init__(self, trainer: Trainer, units: Sequence[Any]) -> None:
        self._rows: dict[tuple[bytes, bytes], TrainingSample] = {}
        for unit in units:
            for row in trainer.objective.get_rows(unit):
                self._rows.setdefault(_key(row), row)

    def find(self, row: TrainingSample) -> TrainingSample | None:
        """The first trained row with the ids and logprobs of `row`; None if it was not trained on."""
        return self._rows.get(_key(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """Writes a sample of each step's rollouts; each process writes that of its own."""

    config: RolloutLogConfig
    trainer: Trainer
    source: str
    """The model that is trained, whose tokenizer made the ids."""
    folder: Path
    rank: Rank

    async def record(self, rollouts: StepRollouts) -> None:
        """Write the chosen groups of a step. Every process calls it.

        Raises:
            MetricsError: the file cannot be written.
            TrainingError: another process raised it.
        """
        if rollouts.step % self.config.every or self.config.groups == 0:
            return
        groups = spread(rollouts.groups, self.config.groups)
        members = [(group.group_id, member) for group in groups for member in group.trajectories]
        rows = [export_samples(member.tree, 0.0) for _, member in members]
        scores = await self._score([row for of_member in rows for row in of_member], rollouts)
        with self.trainer.fail_together():
            await asyncio.to_thread(self._write, rollouts, len(groups), members, rows, scores)

    async def _score(self, rows: Sequence[TrainingSample], rollouts: StepRollouts) -> Sequence[RowScores | None]:
        can_score = self.config.trainer_logprobs and rollouts.is_trained
        if not can_score or not self.trainer.in_any_process(bool(rows)):
            return [None] * len(rows)
        return await asyncio.to_thread(self.trainer.score, rows)

    def _write(
        self,
        rollouts: StepRollouts,
        num_kept: int,
        members: Sequence[tuple[str, Trajectory]],
        rows: Sequence[Sequence[TrainingSample]],
        scores: Sequence[RowScores | None],
    ) -> None:
        trained, rest = TrainedRows(self.trainer, rollouts.units), iter(scores)
        head = {
            "kind": "step",
            "format": FORMAT,
            "step": rollouts.step,
            "rank": self.rank.index,
            "num_processes": self.rank.num_processes,
            "policy_version": self.trainer.policy_version,
            "model": self.source,
            "num_groups": len(rollouts.groups),
            "num_kept": num_kept,
            "counters": rollouts.counters.as_dict(),
        }
        records = [
            make_record(group_id, member, self._make_rows(member, of_member, [next(rest) for _ in of_member], trained))
            for (group_id, member), of_member in zip(members, rows, strict=True)
        ]
        images: dict[str, bytes] = {}
        for (_, member), of_member in zip(members, rows, strict=True):
            images |= find_images(member, of_member)
        write_records(self.folder, rollouts.step, self.rank.index, [head, *records], images=images)

    def _make_rows(
        self,
        member: Trajectory,
        rows: Sequence[TrainingSample],
        scores: Sequence[RowScores | None],
        trained: TrainedRows,
    ) -> list[RecordedRow]:
        found = [trained.find(row) for row in rows]
        pairs = [(row, of_row.logprobs) for row, of_row in zip(found, scores, strict=True) if row and of_row]
        left_out = self.trainer.find_left_out(*zip(*pairs, strict=True)) if pairs else None
        rest = iter(left_out or ())
        return [
            RecordedRow(
                path=path,
                row=row,
                trained=of_row,
                trainer_logprobs=None if score is None else score.logprobs,
                entropies=None if score is None else score.entropies,
                ranks=None if score is None else score.ranks,
                left_out=None if of_row is None or score is None else next(rest, None),
            )
            for path, row, of_row, score in zip(find_trained_paths(member.tree), rows, found, scores, strict=True)
        ]


def make_table(
    rollouts: StepRollouts, trainer: Trainer, num_rows: int, *, unique_prompts: bool = False
) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a table of some completions, evenly spread over the step's rollouts, or over the first
    of each prompt.
    """
    members = [member for group in rollouts.groups for member in group.trajectories]
    if unique_prompts:
        members = list({str(member.messages[: _find_answer(member)]): member for member in members[::-1]}.values())[
            ::-1
        ]
    members = spread(members, num_rows)
    parts = sorted({name for member in members for name in member.reward_parts})
    trained = TrainedRows(trainer, rollouts.units)
    columns = ["prompt", "completion", "reward", *parts, "advantage", "status"]
    return columns, [
        [
            *_split(member),
            member.reward,
            *(member.reward_parts.get(name) for name in parts),
            _find_advantage(member, trained),
            member.status.value,
        ]
        for member in members
    ]


def spread(items: Sequence[_T], number: int | None) -> list[_T]:
    """Up to `number` of the items, evenly spread; all for None."""
    if number is None or number >= len(items):
        return list(items)
    return [items[k * len(items) // number] for k in range(number)]


def _key(row: TrainingSample) -> tuple[bytes, bytes]:
    return row.token_ids.tobytes(), row.rollout_logprobs.tobytes()


def _find_advantage(member: Trajectory, trained: TrainedRows) -> float | None:
    """The mean advantage of a trajectory's loss tokens; None if it is not trained on."""
    found = [of_row for row in export_samples(member.tree, 0.0) if (of_row := trained.find(row)) is not None]
    values = [row.advantages[row.loss_mask] for row in found]
    mean = float(np.concatenate(values).mean()) if values else math.nan
    return mean if math.isfinite(mean) else None


def _split(member: Trajectory) -> tuple[str, str]:
    """The texts of the prompt and of what came after it."""
    first = _find_answer(member)
    return _join(member.messages[:first]), _join(member.messages[first:])


def _find_answer(member: Trajectory) -> int:
    """The number of messages before the first answer."""
    roles = [message["role"] for message in member.messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def _join(messages: Sequence[Any]) -> str:
    texts = [_text_of(message) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def _text_of(message: Any) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(part.get("text", f"[{part.get('type')}]") for part in content)
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return " ".join(filter(None, [message.get("reasoning_content", ""), content, *calls]))
