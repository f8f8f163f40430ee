"""Engines that go away during a run: rollouts lost with them are not failures of the policy, and are sampled again.

    groups of a step ──► lost? ── no ──► the step is trained
        ▲                 │ yes: a rollout found no engine, or has ids sampled by too old weights
        │                 ▼
        └──── the weights published again ◄── wait until an engine takes them
                                              (up to OutageConfig.wait_s, then OutageError)

A group without its lost members would be biased (long rollouts are lost first), and a restarted engine samples with its
first weights. So a group that lost some is sampled again, whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from unbroken.engines.base import Engine, RequiresVersion
from unbroken.errors import EngineError, OutageError, ServerBehindError, ServerUnreachableError, TrainingError
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.training.config import LoopConfig
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together, in_any_process, log_waiting
from unbroken.weights.base import WeightPublisher, WeightUpdate

_GONE = (ServerUnreachableError, ServerBehindError)
_SUSPICIOUS = frozenset({TrajectoryStatus.TIMEOUT, TrajectoryStatus.ABORTED})
"""Statuses of rollouts whose engine hangs or ends; there are other causes too."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Outages:
    """Publishes for one run, finds what was lost with an engine that goes away, and waits for the engine."""

    def __init__(
        self,
        trainer: Trainer | None,
        publisher: WeightPublisher | None,
        config: LoopConfig,
        *,
        engine: Engine | None = None,
    ) -> None:
        """Without `engine` there is no waiting; without a trainer its weights stay as they are. `publisher` is None in
        a process whose engine another process publishes to.
        """
        self._trainer = trainer
        self._publisher = publisher
        self._config = config
        self._engine = engine
        self._num_losses = 0
        self._lost_s = 0.0

    async def repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what comes between steps, such as an evaluation; again if it lost rollouts, once the engines are back.

        `work` raises `OutageError` in all processes or in none.

        Raises:
            OutageError: the engines stayed away, or `work` lost rollouts too often.
        """
        lost: OutageError | None = None
        for _ in range(self._config.outages.max_losses):
            started = time.perf_counter()
            try:
                await work()
                return
            except OutageError as error:
                lost = error
            await self.recover(lost, began_s=started)
        raise self.make_final_error(lost) from lost

    def make_final_error(self, lost: Exception | None) -> OutageError:
        """The error for what was lost `max_losses` times: a prompt that ends its engine would do so without end."""
        return OutageError(
            f"rollouts were lost {self._config.outages.max_losses} times although the engine came back each time (the "
            f"last: {_format_loss(lost)}): look into the engine's log for the cause, which may be a prompt of this step"
        )

    async def recover(self, error: EngineError | OutageError | None, *, began_s: float | None = None) -> None:
        """Wait until every process's engine is healthy and has the trainer's weights.

        `error` says why, in the process that lost its own; what was done since `began_s`, on the clock of
        `time.perf_counter`, is done again, and counts as lost.

        Raises:
            OutageError: they stayed away, or there is nothing to wait for.
        """
        began_s = time.perf_counter() if began_s is None else began_s
        if await in_any_process(self._trainer, self._engine is None):  # it could not wait while the others do
            if isinstance(error, OutageError):
                raise error
            raise OutageError(f"rollouts were lost: {_format_loss(error)}") from error
        _log.warning("rollouts were lost and are sampled again: %s", _format_loss(error))
        await self._retry(self._check_health)
        if self._policy_version > 0:  # an engine starts with version 0
            await self.publish()
        self._num_losses += 1
        self._lost_s += time.perf_counter() - began_s

    async def publish(self) -> tuple[WeightUpdate, float]:
        """Publish the trainer's weights, and wait if the engines are gone; returns for how long, besides the update.

        Raises:
            OutageError: the engines stayed away.
            UnbrokenError: the publisher raised it twice although the engine is there.
        """
        started = time.perf_counter()
        update, lost_s = await self._retry(self._publish_once)
        self.require_newest(self._policy_version)
        # What else a publication took, such as agreeing with other processes, is the publication's, not an outage's.
        return replace(update, seconds=time.perf_counter() - started - lost_s), lost_s

    async def find_loss(self, group: TrajectoryGroup, *, oldest_version: int) -> EngineError | None:
        """The error if the engine was gone, or has ids older than `oldest_version`; None if the group can be used."""
        members = group.trajectories
        for member in members:
            if isinstance(member.error, _GONE):
                return member.error
            if (versions := member.tree.sampled_versions) and versions[0] < oldest_version:
                return ServerBehindError(
                    f"trajectory {member.trajectory_id} was sampled with policy version {versions[0]}, and the trainer "
                    f"has version {self._policy_version} (loop.max_staleness is {self._config.max_staleness})"
                )
        if any(member.status in _SUSPICIOUS or isinstance(member.error, EngineError) for member in members):
            return await self._find_fault()
        return None

    async def is_outage(self, error: EngineError) -> bool:
        """Whether the engine is gone or behind; otherwise it refused this request."""
        return isinstance(error, _GONE) or await self._find_fault() is not None

    def require_newest(self, policy_version: int) -> None:
        """Ignore servers whose weights are too old, now that the engine has taken a version."""
        if isinstance(self._engine, RequiresVersion):
            self._engine.require_version(max(policy_version - self._config.max_staleness, 0))

    def take_metrics(self) -> dict[str, float]:
        """Number of losses and seconds lost since the last call."""
        taken = {"outages/num_losses": self._num_losses, "seconds/outages": self._lost_s}
        self._num_losses, self._lost_s = 0, 0.0
        return taken

    @property
    def _policy_version(self) -> int:
        return 0 if self._trainer is None else self._trainer.policy_version

    async def _find_fault(self) -> EngineError | None:
        """The error of the engine's health check; None if it is healthy."""
        try:
            await self._check_health()
        except EngineError as error:
            return error
        return None

    async def _check_health(self) -> None:
        if self._engine is not None:
            await self._engine.check_health()

    async def _retry(self, attempt: Callable[[], Awaitable[_T]]) -> tuple[_T, float]:
        """Retry until every process succeeds, and return the seconds before the last attempt, 0 if it was the first.

        The second error of a healthy engine is raised.
        """
        began_s, lost_s = time.perf_counter(), 0.0
        deadline_s = time.monotonic() + (0.0 if self._engine is None else self._config.outages.wait_s)
        was_healthy = self._engine is None
        last_warning = ""
        while True:
            error: EngineError | None = None
            done: list[_T] = []
            try:
                done.append(await attempt())
            except EngineError as raised:
                error = raised
            if not await in_any_process(self._trainer, error is not None):
                return done[0], lost_s
            is_healthy = error is not None and not await self.is_outage(error)
            if await in_any_process(self._trainer, is_healthy and was_healthy):
                raise error or TrainingError("another process cannot publish its weights: its own error says why")
            was_healthy = is_healthy
            if await in_any_process(self._trainer, time.monotonic() >= deadline_s):
                raise OutageError(
                    f"no engine answered and took policy version {self._policy_version} for "
                    f"{self._config.outages.wait_s:g} s (OutageConfig.wait_s), the last time because of "
                    f"{_format_loss(error)}"
                ) from error
            if last_warning != (last_warning := _format_loss(error)):
                _log.warning("waiting up to %g s for the engine: %s", self._config.outages.wait_s, last_warning)
            await asyncio.sleep(self._config.outages.ask_every_s)
            lost_s = time.perf_counter() - began_s

    async def _publish_once(self) -> WeightUpdate:
        """Publish the weights as they are. An error of one process is raised on all, but a lost engine in its own."""
        trainer, publisher, update = self._trainer, self._publisher, WeightUpdate(num_bytes=0, seconds=0.0)
        assert trainer is not None, "a run that trains publishes"
        weights, lost = trainer.named_weights(), None
        async with fail_together(trainer, weights):
            if publisher is not None:
                try:
                    async with log_waiting(f"policy version {trainer.policy_version} to be taken by the engine"):
                        update = await publisher.publish(weights, policy_version=trainer.policy_version)
                except EngineError as error:
                    lost = error
        if lost is not None:
            raise lost
        return update


def _format_loss(error: Exception | None) -> str:
    """The error by which this process lost its engine, or that another one did."""
    return "another process lost its engine" if error is None else f"{type(error).__name__}: {error}"
