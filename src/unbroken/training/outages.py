"""Engines that go away in mid run: what is lost with them is no failure of the policy, and is sampled again.

    collect ──► groups ──► lost? ── no ──► the step is trained
       ▲                     │ yes: a rollout met no engine, or holds ids of older weights than the step's
       │                     ▼
       └── the data put ◄── the weights published again ◄── wait until an engine takes them
           back                                             (OutageConfig.wait_s long, then OutageError)

A group without its lost members would be a biased one (long rollouts are lost first), and rows of an engine that was
started again are of its first weights: so the whole step is collected again, by each process that lost a part of it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from unbroken.engines.base import Engine
from unbroken.errors import EngineError, OutageError, ServerBehindError, ServerUnreachableError, TrainingError
from unbroken.ledger.nodes import Origin
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.training.checkpoints import Resumable
from unbroken.training.config import LoopConfig
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate

Collect: TypeAlias = Callable[[], Awaitable[Sequence[TrajectoryGroup]]]
"""Sample the groups of the next step with the weights last published."""

_GONE = (ServerUnreachableError, ServerBehindError)
_SUSPICIOUS = frozenset({TrajectoryStatus.TIMEOUT, TrajectoryStatus.ABORTED})
"""What an engine that hangs or ends makes of a rollout, among other causes."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@runtime_checkable
class _RequiresVersion(Protocol):
    """An engine of several servers, which can refuse those that are behind (`HttpEngine`)."""

    def require_version(self, policy_version: int) -> None: ...


class Outages:
    """Collects and publishes for one run, and waits for the engine where it is known."""

    def __init__(
        self,
        trainer: Trainer,
        collect: Collect,
        publish: Callable[[], Awaitable[WeightUpdate]],
        config: LoopConfig,
        *,
        engine: Engine | None = None,
        data: Resumable | None = None,
    ) -> None:
        """`publish` hands the trainer's weights to the engines. Without `engine` nothing is waited for; without `data`,
        what is collected again are the rows that follow.
        """
        self._trainer = trainer
        self._sample = collect
        self._publish = publish
        self._config = config
        self._engine = engine
        self._data = data
        self._num_losses = 0
        self._lost_s = 0.0

    async def collect(self) -> Sequence[TrajectoryGroup]:
        """The groups of a step, none of whose rollouts was lost.

        Raises:
            OutageError: the engines stayed away, or the step was lost too often. The data stand where they did before.
        """
        before = None if self._data is None else copy.deepcopy(self._data.state())
        try:
            return await self._collect(before)
        except OutageError:
            self._put_back(before)
            raise

    async def publish(self) -> WeightUpdate:
        """Publish the trainer's weights, after a wait where the engines are gone.

        Raises:
            OutageError: they stayed away.
            UnbrokenError: what the publisher raises, if the engine is there and it raises it again.
        """
        started = time.perf_counter()
        update = await self._hand_over()
        self._lost_s += time.perf_counter() - started - update.seconds
        return update

    def take_metrics(self) -> dict[str, float]:
        """What was lost since this was last asked."""
        taken = {"outages/num_losses": self._num_losses, "seconds/outages": self._lost_s}
        self._num_losses, self._lost_s = 0, 0.0
        return taken

    async def _collect(self, before: Mapping[str, Any] | None) -> Sequence[TrajectoryGroup]:
        groups: Sequence[TrajectoryGroup] | None = None
        error: EngineError | None = None
        for _ in range(self._config.outages.max_losses):
            started = time.perf_counter()
            error, failure = None, None
            try:
                if groups is None:
                    groups, error = await self._collect_once()
            except Exception as raised:
                failure = raised
            self._trainer.finish_together((), failure)  # or the others would wait for this process
            if not self._trainer.in_any_process(error is not None):
                assert groups is not None
                return groups
            if error is not None:
                groups = None
                self._put_back(before)
            if self._engine is None:
                raise OutageError(f"rollouts were lost: {_in_words(error)}") from error
            _log.warning("rollouts were lost and are sampled again: %s", _in_words(error))
            await self._until_done(self._check_health)
            if self._trainer.policy_version > 0:  # the first weights an engine has already
                await self._hand_over()
            self._num_losses += 1
            self._lost_s += time.perf_counter() - started
        raise OutageError(
            f"rollouts were lost {self._config.outages.max_losses} times although the engine came back each time (the "
            f"last: {_in_words(error)}): see in the engine's log what ends it, such as a prompt of this step"
        ) from error

    async def _collect_once(self) -> tuple[Sequence[TrajectoryGroup] | None, EngineError | None]:
        try:
            groups = await self._sample()
        except EngineError as error:
            if not await self._is_outage(error):
                raise
            return None, error
        return groups, await self._loss(groups)

    async def _loss(self, groups: Sequence[TrajectoryGroup]) -> EngineError | None:
        """Why these groups cannot be used: a sign that the engine is gone, or has older weights."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        for member in members:
            if isinstance(member.error, _GONE):
                return member.error
            if (version := _oldest_version(member)) is not None and version < self._oldest:
                return ServerBehindError(
                    f"trajectory {member.trajectory_id} was sampled with policy version {version}, and the trainer has "
                    f"version {self._trainer.policy_version} (LoopConfig.max_lag is {self._config.max_lag})"
                )
        if any(member.status in _SUSPICIOUS or isinstance(member.error, EngineError) for member in members):
            return await self._sickness()
        return None

    async def _is_outage(self, error: EngineError) -> bool:
        """Whether the engine is gone or behind, rather than this request refused."""
        return isinstance(error, _GONE) or await self._sickness() is not None

    async def _sickness(self) -> EngineError | None:
        """What the engine says is wrong with it."""
        try:
            await self._check_health()
        except EngineError as error:
            return error
        return None

    async def _check_health(self) -> None:
        if self._engine is not None:
            await self._engine.check_health()

    async def _until_done(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Make an attempt until every process succeeds; an error of a healthy engine is raised the second time."""
        deadline_s = time.monotonic() + (0.0 if self._engine is None else self._config.outages.wait_s)
        was_healthy = self._engine is None
        told = ""
        while True:
            error: EngineError | None = None
            done: list[_T] = []
            try:
                done.append(await attempt())
            except EngineError as raised:
                error = raised
            if not self._trainer.in_any_process(error is not None):
                return done[0]
            is_healthy = error is not None and not await self._is_outage(error)
            if self._trainer.in_any_process(is_healthy and was_healthy):
                raise error or TrainingError("another process cannot publish its weights: its own error says why")
            was_healthy = is_healthy
            if self._trainer.in_any_process(time.monotonic() >= deadline_s):
                raise OutageError(
                    f"no engine took policy version {self._trainer.policy_version} for "
                    f"{self._config.outages.wait_s:g} s (OutageConfig.wait_s), the last time because of "
                    f"{_in_words(error)}"
                ) from error
            if told != (told := _in_words(error)):
                _log.warning("waiting up to %g s for the engine: %s", self._config.outages.wait_s, told)
            await asyncio.sleep(self._config.outages.ask_every_s)

    @property
    def _oldest(self) -> int:
        """The oldest version that may be sampled with."""
        return max(self._trainer.policy_version - self._config.max_lag, 0)

    async def _hand_over(self) -> WeightUpdate:
        """Publish the weights; of several engines, one that missed them is not sampled from any more."""
        update = await self._until_done(self._publish)
        if isinstance(self._engine, _RequiresVersion):
            self._engine.require_version(self._oldest)
        return update

    def _put_back(self, before: Mapping[str, Any] | None) -> None:
        if self._data is not None and before is not None:
            self._data.restore(copy.deepcopy(before))


def _oldest_version(trajectory: Trajectory) -> int | None:
    """Of the weights that sampled its ids; None if it has none."""
    sampled = (node.policy_versions for node in trajectory.tree.nodes if node.origin is Origin.SAMPLED)
    return min((int(versions.min()) for versions in sampled if len(versions)), default=None)


def _in_words(error: Exception | None) -> str:
    return "another process lost its engine" if error is None else f"{type(error).__name__}: {error}"
