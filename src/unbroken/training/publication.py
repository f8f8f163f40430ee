"""How new weights reach the engines: as they are between two steps, or as a copy that is sent while the next are made.

Of several processes one may publish for all. Which version the engines have is then announced without a collective
(`Notices`), because the trainers may be in the middle of a step, in which no process may wait for another:

    process 0    announce(4): publish version 4
    process 1    wait_for(4) ──► its sampler: groups may start
"""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

import torch
from torch.profiler import record_function

from unbroken.errors import EngineError
from unbroken.timeline import Timeline, Track
from unbroken.training.metrics.step_log import StepLog
from unbroken.training.outages import Outages
from unbroken.training.queue import GroupQueue
from unbroken.training.trainer import Trainer
from unbroken.training.waits import Notices, fail_together, log_waiting
from unbroken.weights.base import WeightPublisher
from unbroken.weights.sources import WeightStream


class Publication:
    """Gives the engines of one run the trainer's weights. All processes call its methods together."""

    def __init__(
        self,
        trainer: Trainer,
        publisher: WeightPublisher | None,
        queue: GroupQueue,
        outages: Outages,
        notices: Notices,
        *,
        timeline: Timeline,
        log: StepLog,
    ) -> None:
        """`publisher` is None in a process whose engine another process publishes to. Groups of `queue` that wait for a
        version may start once it is published.
        """
        self._trainer = trainer
        self._publisher = publisher
        self._queue = queue
        self._outages = outages
        self._notices = notices
        self._timeline = timeline
        self._log = log
        self._beside: asyncio.Task[None] | None = None
        """Publishes a copy of the weights, beside the next step."""

    async def publish(self, *, is_part_of_step: bool = True) -> None:
        """Publish the weights as they are, while nothing is sampled. If the engine is gone, wait until it has them.

        The step's metrics have it only if it is part of the step.

        Raises:
            OutageError: the engine stayed away for `OutageConfig.wait_s`, or there is none to wait for.
        """
        version = self._trainer.policy_version
        with self._timeline.span(f"publish version {version}", track=Track.PUBLISHER), record_function("publish"):
            update, lost_s = await self._outages.publish()
        self._note_published(version)
        if is_part_of_step:
            self._log.end_publication(update, lost_s=lost_s)

    async def begin(self) -> None:
        """Copy the weights, and publish the copy beside the next step; the publication before it has ended by then."""
        await self.end()
        version = self._trainer.policy_version
        if self._queue.engine_version == version:  # the wait ended an outage, after which these were published
            return
        with self._timeline.span("snapshot"):
            weights = await copy_weights(self._trainer, self._publisher)
        self._beside = asyncio.create_task(self._publish_beside(weights, version))

    async def end(self) -> None:
        """Wait for the publication beside the steps, in all processes; if it lost the engine, until that is back."""
        if self._beside is None:
            return
        await self._beside
        self._beside = None
        if await self._queue.meet(self._trainer):
            await self.recover()

    async def recover(self) -> None:
        """Wait in all processes until the engines are back, and give them the trainer's weights before a group starts.

        An engine that comes back has the weights that it was started with, and may have missed a publication besides.
        Groups in flight on engines that are there are not cut off.
        """
        with self._timeline.span("outage"):
            if self._beside is not None:
                await self._beside  # if it failed, that is why this was called, or the next meeting raises it
                self._beside = None
            await self._outages.recover(self._queue.lost)
            self._queue.end_outage(self._trainer.policy_version)

    async def close(self) -> None:
        """Cancel what runs beside the steps."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)

    async def _publish_beside(self, weights: WeightStream | None, version: int) -> None:
        """Publish the copy; in a process without a publisher, wait for the one that publishes for it.

        No error leaves this, for it is awaited only where the processes meet: the queue keeps it until then, and starts
        no group.
        """
        try:
            with self._timeline.span(f"publish version {version}", track=Track.PUBLISHER):
                if self._publisher is None or weights is None:
                    is_taken = await self._notices.wait_for(version)
                else:
                    waiting = log_waiting(f"policy version {version} to be taken by the engine")
                    async with self._notices.announce(version), waiting:
                        update = await self._publisher.publish(weights, policy_version=version)
                    is_taken = True
                    self._log.end_publication_beside(update)
        except EngineError as error:
            self._queue.lose(error)
        except Exception as error:
            self._queue.fail(error)
        else:
            if is_taken:  # if not, the process that publishes has the error, and raises it when they meet
                self._outages.require_newest(version)
                self._note_published(version)

    def _note_published(self, version: int) -> None:
        """The engine has this version: groups that waited for it may start."""
        self._queue.set_engine_version(version)
        self._timeline.count("version, published", version=version)


async def copy_weights(trainer: Trainer, publisher: WeightPublisher | None) -> WeightStream | None:
    """A copy of the weights, to be published while the next step is made; None in a process without a publisher.

    It is in the host's memory, in the dtype of the publisher's engine if that is known. Every process calls this: with
    sharded models they gather the weights together.
    """
    weights = trainer.named_weights()
    copies: WeightStream | None = None
    async with fail_together(trainer, weights):
        if publisher is not None:
            dtype = await publisher.dtype() if isinstance(publisher, _CastingPublisher) else None
            copies = await asyncio.to_thread(_copy, weights, dtype)
    return copies


def _copy(weights: WeightStream, dtype: str | None) -> WeightStream:
    weights = weights.cast(dtype)
    copies = []
    for spec, (name, tensor) in zip(weights.specs, weights, strict=True):
        copy = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=tensor.is_cuda)
        copies.append((name, copy.copy_(tensor.detach(), non_blocking=True)))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return WeightStream(weights.specs, copies)


@runtime_checkable
class _CastingPublisher(Protocol):
    """A publisher whose engines have one dtype, so that a copy of the weights is made in it."""

    async def dtype(self) -> str | None:
        """Return the dtype of floating-point weights in the engines, under torch's name; None if there are several."""
        ...
