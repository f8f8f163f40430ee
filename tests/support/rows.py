"""Hand-built training rows and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from support.loops import EachStep
from support.sequences import sampled
from unbroken.counters import Counters
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.training.model.batch import ScoredRow
from unbroken.training.objective.advantages import Advantages
from unbroken.training.objective.pairs import PreferencePair
from unbroken.training.objective.samples import TrajectoryRows, build_trajectories
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, SampledSequence, TrainingSample

TWO_IDS = sampled(7, 8)


def row(
    ids: Sequence[int],
    *,
    sampled: Sequence[int],
    advantage: float = 1.0,
    logprob: float = -4.0,
    version: int = 0,
    temperature: float = 1.0,
) -> TrainingSample:
    """A row that trains all of its sampled ids; `sampled` are their positions."""
    mask = np.isin(np.arange(len(ids)), sampled)
    return TrainingSample(
        token_ids=np.asarray(ids),
        sampled_mask=mask,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, logprob, np.nan),
        policy_versions=np.where(mask, version, NO_VERSION),
        advantages=np.where(mask, advantage, 0.0),
        temperature=temperature,
    )


def unscored(samples: Sequence[TrainingSample]) -> list[ScoredRow]:
    """The rows, whose old logprobs are the sampler's."""
    return [ScoredRow(sample=sample, old_logprobs=sample.rollout_logprobs) for sample in samples]


def random_rows(
    rng: np.random.Generator, num_rows: int, *, vocab_size: int = 64, longest: int = 20
) -> list[TrainingSample]:
    """Rows of 2 to `longest` ids, some of them sampled, with different advantages and logprobs around -4."""
    rows = []
    for _ in range(num_rows):
        length = int(rng.integers(2, longest + 1))
        sampled = 1 + np.flatnonzero(rng.random(length - 1) < 0.6)
        sampled = sampled if len(sampled) else np.array([length - 1])
        ids = rng.integers(0, vocab_size, length)
        advantage, logprob = float(rng.normal()), float(-4 + rng.normal())
        rows.append(row(ids.tolist(), sampled=sampled.tolist(), advantage=advantage, logprob=logprob))
    return rows


def random_pairs(rng: np.random.Generator, num_pairs: int) -> list[PreferencePair]:
    """Pairs of `random_rows`, one to three of them a side."""
    sides = [random_rows(rng, int(rng.integers(1, 4))) for _ in range(2 * num_pairs)]
    return [
        PreferencePair(chosen=_signed(chosen, 1), rejected=_signed(rejected, -1), score_margin=1.0)
        for chosen, rejected in zip(sides[::2], sides[1::2], strict=True)
    ]


def random_trajectories(rng: np.random.Generator, num_trajectories: int) -> list[TrajectoryRows]:
    """Trajectories of one to three `random_rows` with one advantage, in groups of up to two with rewards."""
    units = []
    for k in range(num_trajectories):
        rows, advantage = random_rows(rng, int(rng.integers(1, 4))), float(rng.normal())
        signed = [replace(row, advantages=np.where(row.loss_mask, advantage, 0)) for row in rows]
        units.append(TrajectoryRows(rows=tuple(signed), group=f"group {k // 2}", reward=float(rng.normal())))
    return units


def trajectory(
    reward: float | None,
    *,
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED,
    prompt: Sequence[int] = (5, 6),
    completion: SampledSequence | None = TWO_IDS,
    tree: TokenTree | None = None,
    counters: Counters | None = None,
    name: str = "t",
) -> Trajectory:
    """One prompt and at most one completion, or all that is in `tree`."""
    return Trajectory(
        trajectory_id=name,
        tree=_make_tree(prompt, completion) if tree is None else tree,
        turns=(),
        messages=(),
        tools=(),
        status=status,
        reward=reward,
        counters=counters or Counters(),
        error=RuntimeError("boom") if status is TrajectoryStatus.FAILED else None,
        wall_time_s=0.0,
    )


def group(*members: Trajectory) -> TrajectoryGroup:
    """Siblings."""
    return TrajectoryGroup(group_id="g", trajectories=members)


def at_version(group: TrajectoryGroup, version: int) -> TrajectoryGroup:
    """The same siblings, each with `TWO_IDS` as if weights of this version had sampled them."""
    sequence = sampled(7, 8, versions=[version] * 2)
    members = [replace(member, tree=_make_tree((5, 6), sequence)) for member in group.trajectories]
    return replace(group, trajectories=tuple(members))


def make_source(trainer: Trainer) -> EachStep:
    """Make a source that samples the group of a step: three rewards, by the trainer's weights."""

    async def sample(number: int) -> TrajectoryGroup:
        versions = [trainer.policy_version] * 2
        return group(*[trajectory(float(k), completion=sampled(k, 7, versions=versions)) for k in range(3)])

    return EachStep(sample)


def _make_tree(prompt: Sequence[int], completion: SampledSequence | None) -> TokenTree:
    tree = TokenTree()
    end = tree.add_given(prompt, Origin.PROMPT, parent=None)
    if completion is not None:
        tree.add_sampled(completion, parent=end)
    return tree


def _signed(rows: Sequence[TrainingSample], sign: int) -> tuple[TrainingSample, ...]:
    return tuple(replace(row, advantages=sign * row.loss_mask) for row in rows)


def build_samples(
    groups: Sequence[TrajectoryGroup], advantages: Advantages, counters: Counters
) -> list[TrainingSample]:
    """The rows of `build_trajectories`, each by itself."""
    return [row for unit in build_trajectories(groups, advantages, counters) for row in unit.rows]
