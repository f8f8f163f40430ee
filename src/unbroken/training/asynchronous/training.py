"""Trains asynchronously: the steps of a `Trainer` and the publications of a `WeightPublisher`, for `run_steps`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import reduce
from operator import add

from unbroken.errors import EngineError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.agreement import from_all_processes, in_any_process, raise_together
from unbroken.training.asynchronous.events import IdleTimes, Observer, Observers, TimelineObserver
from unbroken.training.asynchronous.loop import run_steps
from unbroken.training.asynchronous.maker import TakenGroups
from unbroken.training.asynchronous.notices import Notices
from unbroken.training.asynchronous.numbers import GroupNumbers
from unbroken.training.asynchronous.source import GroupSource
from unbroken.training.metrics.writer import Metrics
from unbroken.training.snapshots import Snapshot
from unbroken.training.steps import Collected, Steps, check_some_succeeded, update_metrics
from unbroken.training.waiting import log_waiting

_logger = logging.getLogger(__name__)


async def train_asynchronously(
    source: GroupSource,
    numbers: GroupNumbers,
    steps: Steps,
    *,
    around: Callable[[int], AbstractContextManager[None]],
    observer: Observer | None,
    needs_engine: Callable[[int], bool],
) -> None:
    """Make the remaining steps of a run; the engine has the trainer's weights. Raises as `run_steps` does."""
    config = steps.config
    if config.max_staleness > steps.trainer.max_steady_staleness and steps.trainer.is_main_process:
        _logger.warning(
            "loop.max_staleness is %d: with this loss runs held up to %d, and above some unlearned what they had "
            "learned; divide the learning rate by 4, or watch mismatch/k3 (docs/training.md, Sampling while training)",
            config.max_staleness,
            steps.trainer.max_steady_staleness,
        )
    times = IdleTimes()
    observers: list[Observer] = [times, TimelineObserver(steps.timeline), *([] if observer is None else [observer])]
    notices = await Notices.open(steps.trainer)
    maker = TrainerSteps(steps, notices, around=around, needs_engine=needs_engine, times=times)
    await run_steps(
        source, maker, config, first_step=steps.num_steps, numbers=numbers, observer=Observers(observers),
        has_variance=steps.trainer.has_variance,
    )  # fmt: skip


class TrainerSteps:
    """The `StepMaker` of a run: a trainer in a thread, beside which a publisher sends copies of its weights."""

    def __init__(
        self,
        steps: Steps,
        notices: Notices,
        *,
        around: Callable[[int], AbstractContextManager[None]],
        needs_engine: Callable[[int], bool],
        times: IdleTimes,
    ) -> None:
        """`needs_engine` gets a number of steps made; `times` sees the loop's events."""
        self._steps = steps
        self._trainer = steps.trainer
        self._outages = steps.outages
        self._notices = notices
        self._around = around
        self._needs_engine = needs_engine
        self._times = times
        self._last_made_s = time.perf_counter()
        """When the step before was made, or the loop began."""
        self._trained: Metrics = {}
        self._published: Metrics = {}
        """Of the last publication that has ended."""

    @property
    def policy_version(self) -> int:
        """See `StepMaker`."""
        return self._trainer.policy_version

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """See `StepMaker`."""
        await raise_together(self._trainer, failure)
        return await in_any_process(self._trainer, is_lost)

    async def recover(self, lost: EngineError | None) -> None:
        """See `StepMaker`."""
        await self._outages.recover(lost)

    async def find_loss(self, groups: Sequence[TrajectoryGroup], *, oldest_version: int) -> EngineError | None:
        """See `StepMaker`."""
        return await self._outages.find_loss(groups, oldest_version=oldest_version)

    async def is_outage(self, error: EngineError) -> bool:
        """See `StepMaker`."""
        return await self._outages.is_outage(error)

    async def make_step(self, taken: TakenGroups) -> None:
        """See `StepMaker`."""
        await check_some_succeeded([*taken.groups, *taken.replaced], taken.step, self._trainer)
        with self._around(taken.step):
            trained = await self._steps.train(await self._collect(taken))
        self._trained = await self._steps.save(taken.step, trained, groups=taken.numbers)
        self._last_made_s = time.perf_counter()

    async def snapshot(self) -> Snapshot | None:
        """See `StepMaker`."""
        with self._steps.timeline.span("snapshot"):
            return await self._steps.snapshots.take()

    async def publish(self, snapshot: Snapshot | None, *, policy_version: int) -> bool:
        """See `StepMaker`."""
        is_taken = await self._publish(snapshot, policy_version)
        if is_taken:
            self._outages.require_newest(policy_version)
        return is_taken

    async def _publish(self, snapshot: Snapshot | None, policy_version: int) -> bool:
        publisher = self._steps.publisher
        if publisher is None or snapshot is None:
            return await self._notices.wait_for(policy_version)
        waiting = log_waiting(f"policy version {policy_version} to be taken by the engine")
        async with self._notices.announce(policy_version), waiting:
            update = await publisher.publish(snapshot, policy_version=policy_version)
        self._published = update_metrics(update)
        return True

    def needs_engine(self, step: int) -> bool:
        """See `StepMaker`."""
        return self._steps.after_step is not None and self._needs_engine(step + 1)

    async def end_step(self, step: int) -> None:
        """See `StepMaker`."""
        await self._steps.end(step, {**self._trained, **self._published})
        self._published = {}

    async def _collect(self, taken: TakenGroups) -> Collected:
        counts = reduce(add, await from_all_processes(self._trainer, taken.counts))
        return Collected(
            step=taken.step,
            groups=taken.groups,
            replaced=taken.replaced,
            counters=Collected.count([*taken.groups, *taken.replaced]),
            started=self._last_made_s,
            seconds=taken.waited_s,
            sampling_s=taken.since_last_s,
            metrics={
                **self._outages.take_metrics(),
                **{f"sampler/{name}": value for name, value in asdict(counts).items()},
                **self._times.take_metrics(asyncio.get_running_loop().time()),
            },
        )
