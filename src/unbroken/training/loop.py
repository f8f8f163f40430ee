"""The training loop: sample a step's groups, make units of them, update, save, publish, log.

    sampler    groups in flight ──► finished groups          in the event loop, as far as the staleness bound allows
    trainer    take ── make the step ── publish ── end       in this coroutine; it alone meets other processes

With `max_staleness` above 0 the sampler works ahead, and a copy of the weights is published beside the next step:

    trainer    take ── make the step ── snapshot ── end
    publisher                           └── publish

The trainer waits for the sampler, the sampler for room in its `Window`, and a publication for the one before it. The
loop knows neither messages nor renderers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch.profiler import record_function

from unbroken.engines.base import Engine
from unbroken.errors import EngineError, InvalidInputError, OutageError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.timeline import Timeline
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig
from unbroken.training.groups import FindsLoss, GroupNumbers, GroupSampler, GroupSource, TakenGroups
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.observer import EventKind, LoopEvent, RunObserver
from unbroken.training.outages import Outages, format_loss
from unbroken.training.publication import Notices, Snapshots, publish_together
from unbroken.training.steps import Steps
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together
from unbroken.weights.base import WeightPublisher

_logger = logging.getLogger(__name__)


async def train(
    source: GroupSource,
    *,
    trainer: Trainer,
    publisher: WeightPublisher | None,
    metrics: MetricsWriter | None,
    config: LoopConfig,
    observer: RunObserver | None = None,
    checkpoints: Checkpoints | None = None,
    engine: Engine | None = None,
    timeline: Timeline | None = None,
    snapshots: Snapshots | None = None,
) -> None:
    """Train for `config.num_steps` steps on the groups of `source`, which samples with the weights last published.

    `trainer` and the engine behind `publisher` begin with the same weights and version. A step without anything to
    train on changes no weights. Training is on policy unless `config.max_staleness` is above 0; then the trainer's
    config should correct for older weights (`Objective.for_stale_rows`, docs/design/0017-asynchronous.md).

    Several processes (`accelerate launch`) each call this with their own `source`. `publisher` is None on processes
    whose engine another process publishes to, and `metrics` on all but the first, which writes those of all. An error
    of one of them in what it is given is raised on all.

    With `checkpoints`, a killed run goes on after the newest one: its weights are published, the metrics of its last
    step are written again in place of those from there on, and `observer` sees that step again. If an engine has newer
    weights of a step that was lost (`engine`, `RunObserver.get_newest_version`), the version rises above theirs.

    `engine` is what `source` samples with if it may go away, such as an `HttpEngine`: the loop waits for it, publishes
    the weights again, and samples groups that lost rollouts again. Without `engine` the first such loss ends the run.
    `timeline` is not closed. `snapshots` are the trainer's, if the observer takes copies of its weights too.

    Raises:
        InvalidInputError: the engine has another vocabulary or newer weights, the run has already made more steps, or
            something does not go together (`_check_run`).
        OutageError: the engine stayed away. With `checkpoints` nothing is lost: there is one to go on from.
        RolloutError: every rollout of a step failed, and the first one's error is its cause; or
            `config.max_empty_steps` steps in a row taught nothing.
        CheckpointError: a checkpoint cannot be written or read.
    """
    observer = observer or RunObserver()
    _check_run(source, trainer, observer, config)
    steps = Steps(
        trainer=trainer,
        publisher=publisher,
        outages=Outages(trainer, partial(publish_together, trainer, publisher), config, engine=engine),
        config=config,
        checkpoints=checkpoints,
        metrics=metrics,
        observer=observer,
        timeline=timeline or Timeline(),
        snapshots=snapshots or Snapshots(trainer, [publisher]),
        notices=await Notices.open(trainer),
    )
    try:
        await steps.resume(engine)
        async with fail_together(trainer):
            state = None if steps.last is None else steps.last.groups
            numbers = GroupNumbers.of(source, num_steps=config.num_steps, num_made=steps.num_steps, state=state)
        await run_steps(
            source, steps, config, first_step=steps.num_steps, numbers=numbers, observe=steps.observe,
            has_variance=trainer.has_variance,
        )  # fmt: skip
        if checkpoints is not None:
            await asyncio.to_thread(checkpoints.finish, trainer)
    except OutageError as error:
        raise await steps.save_after_outage(error) from error
    finally:
        if checkpoints is not None:
            await asyncio.to_thread(checkpoints.close)


def _check_run(source: GroupSource, trainer: Trainer, observer: RunObserver, config: LoopConfig) -> None:
    """Raise `InvalidInputError` for what does not go together; warn of more staleness than runs have held up to."""
    if not isinstance(source, GroupSource):
        raise InvalidInputError(
            f"train needs a GroupSource (groups_per_step, sample), which samples one group at a time, got {source!r}"
        )
    if config.max_staleness > 0 and observer.before_update is not None:
        raise InvalidInputError(
            "LoopConfig.max_staleness must be 0 with an engine that sleeps during steps (RunObserver.before_update), "
            "or it could not sample meanwhile"
        )
    if config.replaces_groups and not trainer.can_lack_variance:
        raise InvalidInputError(
            "LoopConfig.max_replacements must be 0, because the trainer's objective leaves out no group for its equal "
            f"rewards, got {config.max_replacements:g}"
        )
    if config.max_staleness > trainer.max_steady_staleness and trainer.is_main_process:
        _logger.warning(
            "loop.max_staleness is %d: with this loss runs held up to %d, and above some unlearned what they had "
            "learned; divide the learning rate by 4, or watch mismatch/k3 (docs/training.md, Sampling while training)",
            config.max_staleness,
            trainer.max_steady_staleness,
        )


class StepMaker(FindsLoss, Protocol):
    """Makes steps, and publishes their weights: what the loop asks of a trainer. A simulation can be one too.

    With several processes, each has one, and they call it together: in the same order, but for `find_loss`,
    `is_outage` and `publish`, which wait for no other process.
    """

    @property
    def policy_version(self) -> int:
        """The version of the trainer's weights."""
        ...

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """A block in which the step is made, its groups are waited for, and it is ended."""
        ...

    async def agree(self, *, is_lost: bool, failure: Exception | None) -> bool:
        """Return whether any process has lost its engine; a failure of one is raised in all."""
        ...

    async def recover(self, lost: EngineError | None) -> None:
        """Wait until the engines are back, and publish the trainer's weights to them.

        Raises:
            OutageError: they stayed away, or there is nothing to wait for.
        """
        ...

    async def make_step(self, taken: TakenGroups) -> None:
        """Train on the groups, and write a checkpoint if one is due. The version rises unless nothing was trained."""
        ...

    async def publish_now(self) -> None:
        """Publish the trainer's weights to the engines, which sample nothing meanwhile; wait if they are gone.

        Raises:
            OutageError: they stayed away.
        """
        ...

    async def snapshot(self) -> Any:
        """A copy of the trainer's weights, for `publish`; None in a process that publishes none."""
        ...

    async def publish(self, snapshot: Any, *, policy_version: int) -> bool:
        """Publish a snapshot, and return whether this process's engine has it now. It may run beside `make_step`.

        Without a snapshot another process publishes; if it fails, that is known at the next agreement.

        Raises:
            EngineError: an engine is gone, or did not take it.
        """
        ...

    def needs_engine(self, step: int) -> bool:
        """Whether `end_step` needs an engine with the step's weights, as an evaluation does."""
        ...

    async def end_step(self, step: int) -> None:
        """Write the step's metrics, and do what comes after it."""
        ...


async def run_steps(
    source: GroupSource,
    maker: StepMaker,
    config: LoopConfig,
    *,
    first_step: int = 0,
    numbers: GroupNumbers | None = None,
    observe: Callable[[LoopEvent], None] = lambda event: None,
    has_variance: Callable[[TrajectoryGroup], bool] = lambda group: True,
) -> None:
    """Make the steps from `first_step` to `config.num_steps`, while the source is sampled.

    The engine has the weights of `maker.policy_version`. `numbers` are those of a run that goes on. Groups without
    variance are replaced, up to `config.max_replacements`. When this returns, the weights of the last step are
    published, and nothing is in flight.

    Raises:
        OutageError: the engines stayed away, or groups were lost too often.
        Exception: as `source.sample`, `maker.make_step` and `maker.end_step` do, in all processes.
    """
    sampler = GroupSampler(
        source,
        numbers or GroupNumbers.of(source, num_steps=config.num_steps),
        config,
        losses=maker,
        observe=observe,
        version=maker.policy_version,
        has_variance=has_variance,
    )
    loop = _Loop(sampler, maker, config)
    try:
        await loop.run(first_step)
    finally:
        await loop.close()


class _Loop:
    def __init__(self, sampler: GroupSampler, maker: StepMaker, config: LoopConfig) -> None:
        self._sampler = sampler
        self._maker = maker
        self._config = config
        self._publishing: asyncio.Task[None] | None = None
        self._published_version = maker.policy_version
        self._taken_s = 0.0
        self._waited_s = 0.0
        """For this process's own groups, since those of a step were taken."""

    async def run(self, first_step: int) -> None:
        self._taken_s = _now_s()
        for step in range(first_step, self._config.num_steps):
            with self._maker.around_step(step):
                await self._make_next(step)
        await self._end_publishing()

    async def close(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._sampler.close()

    async def _make_next(self, step: int) -> None:
        """A frame of its own: while the next step is sampled, nothing keeps the groups of this one in memory."""
        with record_function("rollouts"):
            taken = await self._take(step)
        await self._make(taken)

    async def _take(self, step: int) -> TakenGroups:
        """Wait until every process has its groups for the step; lost engines are waited for together."""
        started, lost = _now_s(), None
        self._sampler.resume()
        for _ in range(self._config.outages.max_losses):
            chosen = await self._wait_for_groups(step)
            lost = self._sampler.lost
            if not await self._maker.agree(is_lost=lost is not None, failure=self._sampler.failure):
                assert chosen is not None, "it waits until there are groups, or something is wrong"
                groups = self._sampler.take(chosen, step)
                taken = self._describe(step, groups, waited_s=_now_s() - started)
                self._sampler.set_next_version(self._maker.policy_version + 1)
                await self._maker.agree(is_lost=False, failure=self._sampler.failure)  # it may be the source's
                return taken
            await self._recover(lost)
        raise OutageError(
            f"rollouts were lost {self._config.outages.max_losses} times although the engine came back each time (the "
            f"last: {format_loss(lost)}): look into the engine's log for the cause, which may be a prompt of this step"
        ) from lost

    async def _wait_for_groups(self, step: int) -> Any:
        """The groups of the step; None if the engine is lost or the run fails."""
        sampler, version = self._sampler, self._maker.policy_version
        has_waited, started = False, _now_s()
        while (chosen := sampler.choose(version)) is None and sampler.lost is None and sampler.failure is None:
            if not has_waited:
                sampler.note(EventKind.WAIT_BEGUN, step=step)
            has_waited = True
            sampler.changed.clear()
            await sampler.changed.wait()
        if has_waited:
            sampler.note(EventKind.WAIT_ENDED, step=step)
            self._waited_s += _now_s() - started
        return chosen

    def _describe(self, step: int, groups: Sequence[TrajectoryGroup], *, waited_s: float) -> TakenGroups:
        before, self._taken_s = self._taken_s, _now_s()
        since_last_s = self._taken_s - before
        self._sampler.pace.end_wait(
            waited_s=self._waited_s, since_last_s=since_last_s, num_queued=self._sampler.num_queued
        )
        self._waited_s = 0.0
        return TakenGroups(
            step=step,
            groups=groups,
            replaced=self._sampler.take_replaced(),
            counts=self._sampler.take_counts(),
            waited_s=waited_s,
            since_last_s=since_last_s,
            numbers=self._sampler.get_state(),
        )

    async def _make(self, taken: TakenGroups) -> None:
        sampler, maker = self._sampler, self._maker
        version = maker.policy_version
        sampler.note(EventKind.STEP_BEGUN, step=taken.step, version=version)
        await maker.make_step(taken)
        sampler.note(EventKind.STEP_ENDED, step=taken.step, version=maker.policy_version)
        if maker.policy_version == version:  # nothing was trained
            sampler.set_next_version(version)
        elif self._config.max_staleness == 0:
            await self._publish_now()
        else:
            await self._begin_publishing()
        if maker.needs_engine(taken.step):
            await self._end_publishing()
        await maker.end_step(taken.step)

    async def _publish_now(self) -> None:
        """Publish while nothing is sampled, without a copy of the weights."""
        version = self._maker.policy_version
        self._sampler.note(EventKind.PUBLISH_BEGUN, version=version)
        await self._maker.publish_now()
        self._sampler.set_engine_version(version)
        self._sampler.note(EventKind.PUBLISH_ENDED, version=version)

    async def _begin_publishing(self) -> None:
        """Publish a copy of the weights; the next step begins meanwhile, unless the config says otherwise."""
        await self._end_publishing()
        version = self._maker.policy_version
        if self._sampler.engine_version == version:  # an outage has ended meanwhile
            return
        weights = await self._maker.snapshot()
        self._publishing = asyncio.create_task(self._publish(weights, version))
        if not self._config.publish_beside_step:
            await self._end_publishing()

    async def _publish(self, weights: Any, version: int) -> None:
        self._sampler.note(EventKind.PUBLISH_BEGUN, version=version)
        try:
            is_known = await self._maker.publish(weights, policy_version=version)
        except EngineError as error:
            self._sampler.lose(error)
        except Exception as error:
            self._sampler.fail(error)
        else:
            self._published_version = version
            if is_known:
                self._sampler.set_engine_version(version)
        self._sampler.note(EventKind.PUBLISH_ENDED, version=version)

    async def _end_publishing(self) -> None:
        """Wait for the publication, in all processes; if an engine was lost, until it is back."""
        if self._publishing is None:
            return
        await self._publishing
        self._publishing = None
        lost = self._sampler.lost
        if await self._maker.agree(is_lost=lost is not None, failure=self._sampler.failure):
            await self._recover(lost)
        else:
            self._sampler.set_engine_version(self._published_version)

    async def _recover(self, lost: EngineError | None) -> None:
        """Wait in all processes until the engines have the trainer's weights."""
        self._sampler.note(EventKind.OUTAGE_BEGUN)
        if self._publishing is not None:
            await self._publishing  # its own error is why we are here, or is raised at the next agreement
            self._publishing = None
        await self._maker.recover(lost)
        self._sampler.end_outage(self._maker.policy_version)
        self._sampler.note(EventKind.OUTAGE_ENDED)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
