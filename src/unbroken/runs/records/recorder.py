"""Chooses the rollouts of a step that are kept, scores them by the trainer, and writes them; and a table of some."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.runs.config import RolloutLogConfig
from unbroken.runs.processes import Rank
from unbroken.runs.records.files import find_records, spread
from unbroken.runs.records.record import RecordedRow, describe_rewards, write_groups
from unbroken.training.model.row_scores import RowScores
from unbroken.training.objective.base import LeftOut
from unbroken.training.observer import StepRollouts
from unbroken.training.trainer import Trainer
from unbroken.types import Logprobs, TrainingSample

_PAUSES_S = 0.4
"""All pauses of a file together. More than a short step has, and those that are left are left out."""


class _TrainedRows:
    """The rows that a step trains on, to be found by the ids and logprobs that were sampled."""

    def __init__(self, trainer: Trainer, units: Sequence[Any]) -> None:
        self._rows: dict[tuple[bytes, bytes, str | None], TrainingSample] = {}
        for unit in units:
            for row in trainer.objective.get_rows(unit):
                self._rows.setdefault(_key(row), row)

    def find(self, row: TrainingSample) -> TrainingSample | None:
        """The first trained row with the ids and logprobs of `row`; None if it was not trained on."""
        return self._rows.get(_key(row))


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Writes a sample of each step's rollouts, beside its update; each process writes its own rollouts."""

    config: RolloutLogConfig
    trainer: Trainer
    source: str
    """The model that is trained, whose tokenizer made the ids."""
    folder: Path
    rank: Rank
    num_steps: int
    """Of the run, over which `max_mb` is spread."""
    _writing: asyncio.Task[Path] | None = field(init=False, default=None)
    """Of the last step's file."""
    _hurry: threading.Event = field(init=False, default_factory=threading.Event)
    """Set once it is waited for."""

    async def record(self, rollouts: StepRollouts) -> None:
        """Begin to write the chosen groups of a step, after those of the step before. Every process calls it.

        Raises: as `finish`.
        """
        await self.finish()
        if self.config.groups == 0:
            return
        room = await asyncio.to_thread(self._find_room, rollouts.step)
        groups = choose_groups(spread(rollouts.groups, self.config.groups), max_bytes=room)
        scores = await self._score(choose_scored(groups, self.config.scored_groups), rollouts)
        with self.trainer.fail_together():
            head, described = await asyncio.to_thread(self._describe, rollouts, groups, scores)
        # What is written from here on does not change, and needs neither the trainer nor its GPU.
        self._hurry = threading.Event()
        take = partial(_take_in_turn, described, self._hurry)
        write = partial(write_groups, self.folder, head, groups, take)
        self._writing = asyncio.create_task(asyncio.to_thread(write))

    async def finish(self) -> None:
        """Wait until the file of the last step is written. Every process calls it.

        Raises:
            MetricsError: the file cannot be written.
            TrainingError: another process raised it.
        """
        writing, self._writing = self._writing, None
        self._hurry.set()
        with self.trainer.fail_together():
            if writing is not None:
                await writing

    def _find_room(self, step: int) -> float:
        """How many bytes the step may have: an equal part of `max_mb`, and what the steps before it have left."""
        if self.config.max_mb is None:
            return math.inf
        share = self.config.max_mb * 1e6 / self.rank.num_processes * (step + 1) / max(self.num_steps, step + 1)
        before = [
            path for (at, rank), path in find_records(self.folder).items() if at < step and rank == self.rank.index
        ]
        return share - sum(path.stat().st_size for path in before)

    async def _score(
        self, groups: Sequence[TrajectoryGroup], rollouts: StepRollouts
    ) -> Mapping[str, Sequence[RowScores]]:
        """Score the rows of these groups; nothing if no process has any, or the engine has the trainer's memory."""
        members = [member for group in groups for member in group.trajectories]
        chosen = [row for member in members for _, row in member.tree.rows]
        if not rollouts.is_trained or not self.trainer.in_any_process(bool(chosen)):
            return {}
        scores = iter(await asyncio.to_thread(rollouts.score, chosen))
        return {member.trajectory_id: [next(scores) for _ in member.tree.rows] for member in members}

    def _describe(
        self,
        rollouts: StepRollouts,
        groups: Sequence[TrajectoryGroup],
        scores: Mapping[str, Sequence[RowScores]],
    ) -> tuple[Mapping[str, Any], Mapping[str, Sequence[RecordedRow]]]:
        """The head of the file, and the rows of each trajectory by its id: all that the update is about to change."""
        head = {
            "step": rollouts.step,
            "rank": self.rank.index,
            "num_processes": self.rank.num_processes,
            "policy_version": self.trainer.policy_version,
            # Where nothing is trained, the engine may have the memory that a checksum takes.
            "weights": self.trainer.weights_checksum if rollouts.is_trained else None,
            "model": self.source,
            **describe_rewards([group.rewards for group in rollouts.groups]),
            "counters": rollouts.counters.as_dict(),
        }
        trained = _TrainedRows(self.trainer, rollouts.units)
        described: dict[str, Sequence[RecordedRow]] = {}
        for group in groups:
            names = [member.trajectory_id for member in group.trajectories]
            of_group = [_describe_rows(each, scores.get(each.trajectory_id), trained) for each in group.trajectories]
            described.update(zip(names, self._add_left_out(of_group), strict=True))
        return head, described

    def _add_left_out(self, members: Sequence[Sequence[RecordedRow]]) -> list[list[RecordedRow]]:
        """Add what the loss left out to the rows of a group, all of each member's; without scores it is not known."""
        pairs = [of_member for rows in members if (of_member := _list_compared(rows))]
        units = [[row for row, _ in of_member] for of_member in pairs]
        logprobs = [of_row for of_member in pairs for _, of_row in of_member]
        # At once for a group: on a GPU a call launches a hundred small kernels, and waits for what they find.
        found = self.trainer.find_left_out(units, logprobs) if units else None
        rest = iter(found or ())
        return [list(_fill_left_out(rows, rest)) for rows in members]


def _fill_left_out(rows: Sequence[RecordedRow], rest: Iterator[LeftOut]) -> Iterator[RecordedRow]:
    """The rows, with the next of what the loss left out for each that is trained and scored, if there is any."""
    for each in rows:
        yield replace(each, left_out=next(rest, None)) if _list_compared([each]) else each


def _list_compared(rows: Sequence[RecordedRow]) -> list[tuple[TrainingSample, Logprobs]]:
    """The rows that are trained and scored, as they are trained, and the trainer's logprobs."""
    found = ((each.trained, each.trainer_logprobs) for each in rows)
    return [(row, logprobs) for row, logprobs in found if row is not None and logprobs is not None]


def _describe_rows(member: Trajectory, scores: Sequence[RowScores] | None, trained: _TrainedRows) -> list[RecordedRow]:
    """What the trainer made of each row, but for what the loss left out."""
    rows = member.tree.rows
    known: Sequence[RowScores | None] = [None] * len(rows) if scores is None else scores
    return [
        RecordedRow(
            path=path,
            row=row,
            trained=trained.find(row),
            trainer_logprobs=None if score is None else score.logprobs,
            entropies=None if score is None else score.entropies,
            ranks=None if score is None else score.ranks,
        )
        for (path, row), score in zip(rows, known, strict=True)
    ]


def _take_in_turn(
    described: Mapping[str, Sequence[RecordedRow]], hurry: threading.Event, member: Trajectory
) -> Sequence[RecordedRow]:
    """The rows of a trajectory, after a short pause, unless there is a `hurry`."""
    # The update's kernels are launched from Python. Without pauses the writer has the interpreter for half of the time
    # just then: launches that take 74 ms alone took 153 beside it, and 111 with pauses. Later, while an engine samples
    # the next rollouts, the interpreter is free.
    hurry.wait(_PAUSES_S / len(described))
    return described[member.trajectory_id]


def choose_groups(groups: Sequence[TrajectoryGroup], *, max_bytes: float) -> list[TrajectoryGroup]:
    """All groups if they have room, else at least one: in turns one whose rewards differ, one with a failure and one
    with the best or worst reward of all, and the others last.

    Worked example, room for 3 of 5 groups, with the rewards 0 0, 0 1, 0 0, 1 1, 0 failed: the second, the last and the
    first.
    """
    if sum(map(_estimate_bytes, groups)) <= max_bytes:
        return list(groups)
    order = _order_by_interest(groups)
    sizes = itertools.accumulate(_estimate_bytes(groups[k]) for k in order)
    number = max(1, sum(size <= max_bytes for size in sizes))
    return [groups[k] for k in sorted(order[:number])]


def _order_by_interest(groups: Sequence[TrajectoryGroup]) -> list[int]:
    """The places of the groups, those that `choose_groups` takes first in front."""
    known = [[reward for reward in group.rewards if reward is not None] for group in groups]
    rewards = sorted(itertools.chain.from_iterable(known))
    ends = {*rewards[:1], *rewards[-1:]}
    with_variance = [k for k, each in enumerate(known) if len(set(each)) > 1]
    with_failure = [k for k, each in enumerate(known) if len(each) < len(groups[k].trajectories)]
    with_extreme = [k for k, each in enumerate(known) if ends & set(each)]
    turns = itertools.chain.from_iterable(itertools.zip_longest(with_variance, with_failure, with_extreme))
    return [k for k in dict.fromkeys([*turns, *range(len(groups))]) if k is not None]


def choose_scored(groups: Sequence[TrajectoryGroup], number: int | None) -> list[TrajectoryGroup]:
    """Up to `number` of the groups, of those whose rewards differ if there are as many: these are trained."""
    varied = [group for group in groups if len(set(group.rewards) - {None}) > 1]
    return spread(varied if number is not None and len(varied) >= number else groups, number)


def _estimate_bytes(group: TrajectoryGroup) -> int:
    """About how many bytes of a file a group takes, by what files of drawn lengths took."""
    ids = sum(len(node.token_ids) for each in group.trajectories for node in each.tree.nodes)
    return 3 * ids + 9 * group.num_sampled + (1000 + len(str(group.data)) // 2) * len(group.trajectories)


def make_table(rollouts: StepRollouts, trainer: Trainer, num_rows: int) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a table of some completions, evenly spread over the step's rollouts."""
    members = spread([member for group in rollouts.groups for member in group.trajectories], num_rows)
    parts = sorted({name for member in members for name in member.reward_parts})
    trained = _TrainedRows(trainer, rollouts.units)
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


def _key(row: TrainingSample) -> tuple[bytes, bytes, str | None]:
    # A policy and its frozen copy of the same version say the same with the same logprobs, and one of them is trained.
    return row.token_ids.tobytes(), row.rollout_logprobs.tobytes(), row.policy


def _find_advantage(member: Trajectory, trained: _TrainedRows) -> float | None:
    """The mean advantage of a trajectory's loss tokens; None if it is not trained on."""
    found = [of_row for _, row in member.tree.rows if (of_row := trained.find(row)) is not None]
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
