"""The asynchronous loop of one process: the sampler works ahead, the trainer takes a step's groups, and so on.

    sampler    groups in flight ──► finished groups          in the event loop, as far as the staleness bound allows
    trainer    take ── make the step ── snapshot ── end      in this coroutine; it alone meets other processes
    publisher                           └── publish          beside the next step

The trainer waits for the sampler, the sampler for room in its `Window`, and a publication for the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from unbroken.errors import EngineError, OutageError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.asynchronous.events import EventKind, NoObserver, Observer
from unbroken.training.asynchronous.maker import StepMaker, TakenGroups
from unbroken.training.asynchronous.numbers import GroupNumbers
from unbroken.training.asynchronous.sampler import Sampler
from unbroken.training.asynchronous.source import GroupSource
from unbroken.training.config import LoopConfig


async def run_steps(
    source: GroupSource,
    maker: StepMaker,
    config: LoopConfig,
    *,
    first_step: int = 0,
    numbers: GroupNumbers | None = None,
    observer: Observer | None = None,
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
    numbers = numbers or GroupNumbers(config.num_steps * source.groups_per_step)
    sampler = Sampler(
        source, numbers, config, losses=maker, observer=observer or NoObserver(), version=maker.policy_version,
        has_variance=has_variance,
    )  # fmt: skip
    loop = _Loop(sampler, maker, config)
    try:
        await loop.run(first_step)
    finally:
        await loop.close()


class _Loop:
    def __init__(self, sampler: Sampler, maker: StepMaker, config: LoopConfig) -> None:
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
        self._sampler.fill()
        for step in range(first_step, self._config.num_steps):
            await self._make(await self._take(step))
        await self._end_publishing()

    async def close(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._sampler.close()

    async def _take(self, step: int) -> TakenGroups:
        """Wait until every process has its groups for the step; lost engines are waited for together."""
        started, lost = _now_s(), None
        for _ in range(self._config.outages.max_losses):
            chosen = await self._wait_for_groups(step)
            lost = self._sampler.lost
            if not await self._maker.agree(is_lost=lost is not None, failure=self._sampler.failure):
                assert chosen is not None, "it waits until there are groups, or something is wrong"
                groups = self._sampler.take(chosen, step)
                return self._describe(step, groups, waited_s=_now_s() - started)
            await self._recover(lost)
        raise OutageError(
            f"rollouts were lost {self._config.outages.max_losses} times although the engine came back each time (the "
            f"last: {lost}): look into the engine's log for the cause, which may be a prompt of this step"
        )

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
            numbers=self._sampler.numbers.state(),
        )

    async def _make(self, taken: TakenGroups) -> None:
        sampler, maker = self._sampler, self._maker
        version = maker.policy_version
        sampler.note(EventKind.STEP_BEGUN, step=taken.step, version=version)
        sampler.set_next_version(version + 1)
        await maker.make_step(taken)
        sampler.note(EventKind.STEP_ENDED, step=taken.step, version=maker.policy_version)
        if maker.policy_version == version:  # nothing was trained
            sampler.set_next_version(version)
        else:
            await self._begin_publishing()
        if maker.needs_engine(taken.step):
            await self._end_publishing()
        await maker.end_step(taken.step)

    async def _begin_publishing(self) -> None:
        """Publish the trainer's weights; the next step begins meanwhile, unless the config says otherwise."""
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
