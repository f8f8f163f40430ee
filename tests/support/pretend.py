"""An engine, a source and a trainer that only take time, for the real loop on a virtual clock: no model, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.loops import Callbacks
from support.rows import trajectory
from support.steps import train
from support.virtual_clock import run_on_virtual_clock
from unbroken.errors import ServerUnreachableError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline
from unbroken.training.checkpoints import LastStep
from unbroken.training.config import LoopConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.mismatch import Mismatch
from unbroken.training.metrics.stats import StepStats
from unbroken.types import FinishReason, SampledSequence, VersionSpan, token_ids
from unbroken.weights.base import WeightUpdate
from unbroken.weights.sources import WeightStream

LIMIT_S = 10**7


def has_variance(group: TrajectoryGroup) -> bool:
    """Whether the rewards of a group differ."""
    return len({member.reward for member in group.trajectories}) > 1


@dataclass
class PretendEngine:
    """An engine that is its version, and whether it is there; also its publisher."""

    publish_s: Callable[[int], float] = lambda version: 1.0
    policy_version: int = 0
    num_refusals: int = 0
    """How many more calls fail, after which it is there again."""
    published: list[int] = field(default_factory=list)
    vocab_size: int = 64
    num_outages: int = 0

    def goes_away(self, num_refusals: int = 3) -> None:
        """It restarts with its first weights."""
        self.num_refusals, self.policy_version = num_refusals, 0
        self.num_outages += 1

    async def check_health(self) -> None:
        """See `Engine`."""
        if self.num_refusals > 0:
            self.num_refusals -= 1
            raise ServerUnreachableError("the engine is away")

    async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
        """See `WeightPublisher`."""
        await asyncio.sleep(self.publish_s(policy_version))
        await self.check_health()
        self.policy_version = policy_version
        self.published.append(policy_version)
        return WeightUpdate(num_bytes=1, seconds=0.0)


@dataclass
class PretendSource(GroupSource):
    """Groups of two rollouts with an id at each end of their time; `seconds` says how long a number takes."""

    engine: PretendEngine
    seconds: Callable[[int, int], float]
    """From a number, and how often it was sampled before."""
    groups_per_step: int
    rewards: Callable[[int], tuple[float, float]] = lambda number: (0.0, 1.0)
    num_starts: dict[int, int] = field(default_factory=dict)
    num_running: int = 0
    max_running: int = 0

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        num_before = self.num_starts.get(number, 0)
        self.num_starts[number] = num_before + 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            first = self.engine.policy_version
            seconds = self.seconds(number, num_before)
            for _ in range(int(seconds)):
                await asyncio.sleep(1.0)
                if self.engine.num_refusals > 0:
                    raise ServerUnreachableError("the engine is away")
            await asyncio.sleep(seconds % 1)
            await self.engine.check_health()
            last = self.engine.policy_version
            versions = [min(first, last), last]  # one that has restarted samples the whole again
        finally:
            self.num_running -= 1
        return make_group(number, versions, self.rewards(number))


class PretendTrainer:
    """What the loop asks of a trainer. A step takes `step_s` before its update, which takes no time."""

    vocab_size = 64
    is_main_process = True
    config = processes = None

    def __init__(
        self,
        step_s: Callable[[int], float] = lambda step: 3.0,
        *,
        policy_version: int = 0,
        trains: Callable[[int], bool] = lambda step: True,
        judge: Callable[[TrajectoryGroup], bool] = has_variance,
    ) -> None:
        self.step_s = step_s
        self.policy_version = policy_version
        self.trains = trains
        self.objective = SimpleNamespace(
            make_units=self.make_units,
            get_rows=lambda unit: unit,
            get_idle_rows=lambda unit: [],
            get_metrics=lambda units: {},
            has_variance=lambda group, config: judge(group),
            can_lack_variance=lambda config: True,
        )
        self.groups: list[Sequence[TrajectoryGroup]] = []
        """Of each step, those that were taken."""
        self.sampled: list[Sequence[TrajectoryGroup]] = []
        """Also those that were replaced."""
        self.staleness: list[int] = []
        """Of the oldest id of each group."""
        self.states: list[LastStep] = []
        """What a checkpoint after each step has besides the trainer."""
        self.ended: list[int] = []
        self.num_steps = 0

    @property
    def trained(self) -> list[int]:
        """The numbers of the groups that were taken for steps, in their order."""
        return [int(group.group_id) for groups in self.groups for group in groups]

    @property
    def replaced(self) -> list[int]:
        """The numbers of the groups that were replaced."""
        return [
            int(group.group_id)
            for groups, sampled in zip(self.groups, self.sampled, strict=True)
            for group in sampled[len(groups) :]
        ]

    async def make_units(self, groups: Sequence[TrajectoryGroup], *_: Any) -> list[Any]:
        """See `Objective`."""
        if len(self.groups) == len(self.sampled):  # the step's own come before the replaced ones
            self.groups.append(groups)
            trains = self.trains(self.num_steps)
            return [[SimpleNamespace(loss_mask=np.ones(2))] for _ in groups] if trains else []
        return []

    async def on_rollouts(self, rollouts: Any) -> None:
        """See `RunObserver`."""
        self.sampled.append(rollouts.groups)
        for group in self.groups[-1]:
            self.staleness.append(self.policy_version - min(group.sampled_versions))
        await asyncio.sleep(self.step_s(rollouts.step))
        self.num_steps += 1

    def step(self, units: Sequence[Any]) -> StepStats:
        """See `Trainer`."""
        self.policy_version += 1
        numbers = dict.fromkeys(StepStats.__dataclass_fields__, 0)
        mismatch = Mismatch(**dict.fromkeys(Mismatch.__dataclass_fields__, 0))
        none = dict.fromkeys(("objective", "supervised", "routing", "reference_k3", "entropy_weight", "router_loss"))
        own = {"mismatch": mismatch, "num_rows": len(units), "seconds": 1.0}
        own |= {name: {} for name in ("k3_by_lag", "ids_by_staleness", "teachers", "policies")}
        return StepStats(**{**numbers, **none, **own})  # type: ignore[arg-type]

    def logprobs(self, samples: Sequence[Any]) -> list[Any]:
        """See `Trainer`."""
        return [sample.rollout_logprobs for sample in samples]

    def check_policy(self, samples: Sequence[Any], logprobs: Sequence[Any]) -> None:
        """See `Trainer`."""

    def named_weights(self) -> WeightStream:
        """See `Trainer`."""
        return WeightStream((), ())

    def finish_together(self, weights: Any, error: Exception | None) -> None:
        """See `Trainer`."""
        if error is not None:
            raise error

    @contextmanager
    def fail_together(self) -> Any:
        """See `Trainer`."""
        yield

    def in_any_process(self, flag: bool) -> bool:
        """See `Trainer`."""
        return flag

    def from_all_processes(self, value: Any) -> list[Any]:
        """See `Trainer`."""
        return [value]

    def from_main_process(self, value: Any) -> Any:
        """See `Trainer`."""
        return value


class PretendCheckpoints:
    """Checkpoints in memory, one after each step (`PretendTrainer.states`)."""

    folder = "checkpoints"

    def __init__(self, trainer: PretendTrainer, last: LastStep | None) -> None:
        self.trainer = trainer
        self.last = last

    def resume(self, trainer: Any) -> Any:
        """See `Checkpoints`."""
        return self.last

    def agree_if_due(self, trainer: Any, num_steps: int, *, last: int) -> bool:
        """See `Checkpoints`."""
        return True

    def save(self, trainer: Any, last: Any) -> None:
        """See `Checkpoints`."""
        self.trainer.states.append(last)
        self.last = last

    def save_last(self, trainer: Any, last: Any) -> None:
        """See `Checkpoints`."""
        if self.last is None and last is not None:
            self.save(trainer, last)

    def finish(self, trainer: Any) -> None:
        """See `Checkpoints`."""

    def close(self) -> None:
        """See `Checkpoints`."""


async def pretend_to_train(
    source: GroupSource,
    engine: Any,
    trainer: PretendTrainer,
    config: LoopConfig,
    *,
    after: LastStep | None = None,
    timeline: Timeline | None = None,
    **callbacks: Any,
) -> None:
    """Train with the real loop, after the last step of `after`."""

    def on_step(step: int, metrics: Any) -> None:
        trainer.ended.append(step)

    async with asyncio.timeout(LIMIT_S):
        await train(
            source,
            trainer=trainer,  # type: ignore[arg-type]
            publisher=engine,
            metrics=None,
            config=config,
            observer=Callbacks(on_rollouts=trainer.on_rollouts, on_step=on_step, **callbacks),
            checkpoints=PretendCheckpoints(trainer, after),  # type: ignore[arg-type]
            engine=engine,
            timeline=timeline,
        )


def run(*arguments: Any, **options: Any) -> None:
    """As `pretend_to_train`, on a virtual clock."""
    run_on_virtual_clock(pretend_to_train(*arguments, **options))


def make_group(number: int, versions: list[int], rewards: Sequence[float]) -> TrajectoryGroup:
    """A group whose rollouts have an id of each version."""
    members = tuple(trajectory(reward, completion=_sequence(versions)) for reward in rewards)
    return TrajectoryGroup(group_id=str(number), trajectories=members)


def _sequence(versions: list[int]) -> SampledSequence:
    spans = [VersionSpan(start=at, stop=at + 1, policy_version=version) for at, version in enumerate(versions)]
    return SampledSequence(
        completion_ids=token_ids(np.array([5, 9])),
        rollout_logprobs=np.array([-0.5, -0.5], dtype=np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=tuple(spans),
    )
