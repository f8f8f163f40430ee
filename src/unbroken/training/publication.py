"""How new weights leave the trainer: as they are between two steps, or as a copy that is sent while the next are made.

Of several processes one may publish for all. Which version the engines have is then announced without a collective,
because the trainers may be in the middle of a step, in which no process may wait for another:

    process 0    announce(4): publish version 4
    process 1    wait_for(4) ──► its sampler: groups may start
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable
from uuid import uuid4

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from unbroken.errors import EngineError
from unbroken.training.trainer import Trainer
from unbroken.training.waits import from_all_processes, log_waiting
from unbroken.weights.adapters import is_adapter
from unbroken.weights.base import WeightPublisher, WeightUpdate
from unbroken.weights.sources import WeightStream

_POLL_S = 0.01
_TAKEN, _FAILED = "taken", "failed"


async def publish_together(trainer: Trainer, publisher: WeightPublisher | None) -> WeightUpdate:
    """Publish the weights as they are; an error of one process is raised on all, but a lost engine in its own only, for
    `Outages` to settle.
    """
    started = time.perf_counter()
    weights = trainer.named_weights()
    update, gone, failure = None, None, None
    try:
        if publisher is not None:
            async with log_waiting(f"policy version {trainer.policy_version} to be taken by the engine"):
                update = await publisher.publish(weights, policy_version=trainer.policy_version)
    except EngineError as error:
        gone = error
    except Exception as error:
        failure = error
    await asyncio.to_thread(trainer.finish_together, weights, failure)
    if gone is not None:
        raise gone
    return update or WeightUpdate(num_bytes=0, seconds=time.perf_counter() - started)


async def copy_weights(trainer: Trainer, publisher: WeightPublisher | None) -> WeightStream | None:
    """A copy of the weights, to be published while the next step is made; None in a process without a publisher.

    It is in the host's memory, in the dtype of the publisher's engine if that is known. Every process calls this: with
    sharded models they gather the weights together.
    """
    weights = trainer.named_weights()
    copies: WeightStream | None = None
    failure: Exception | None = None
    if publisher is not None:
        try:
            dtype = await publisher.dtype() if isinstance(publisher, _CastingPublisher) else None
            copies = await asyncio.to_thread(_copy, weights, dtype)
        except Exception as error:
            failure = error
    await asyncio.to_thread(trainer.finish_together, weights, failure)
    return copies


def _copy(weights: WeightStream, dtype: str | None) -> WeightStream:
    if not is_adapter([spec.name for spec in weights.specs]):  # an engine may merge an adapter in float32
        weights = weights.cast(dtype)
    copies = []
    for spec, (name, tensor) in zip(weights.specs, weights, strict=True):
        copy = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=tensor.is_cuda)
        copies.append((name, copy.copy_(tensor.detach(), non_blocking=True)))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return WeightStream(weights.specs, copies)


class Notices:
    """What became of each version, in the key-value store that the processes met in. Made by `open`."""

    def __init__(self, store: Store | None, *, is_main_process: bool) -> None:
        """There is no store in a run of one process."""
        self._store = store
        self._is_main_process = is_main_process

    @classmethod
    async def open(cls, trainer: Trainer) -> Notices:
        """Agree with the other processes on keys that no other run of theirs uses."""
        name = (await from_all_processes(trainer, uuid4().hex))[0]
        if not torch.distributed.is_initialized():
            return cls(None, is_main_process=True)
        store = PrefixStore(f"unbroken/published/{name}", _get_default_store())
        return cls(store, is_main_process=trainer.is_main_process)

    @asynccontextmanager
    async def announce(self, version: int) -> AsyncIterator[None]:
        """Tell the others that the engine has taken this version, or if the block raises that it has not.

        Of several processes that publish, each to its own engine, the main process speaks for all.
        """
        posted = _FAILED
        try:
            yield
            posted = _TAKEN
        finally:
            if self._store is not None and self._is_main_process:
                await asyncio.to_thread(self._store.set, str(version), posted)

    async def wait_for(self, version: int) -> bool:
        """Wait until another process has announced what became of this version, and return whether it was taken."""
        if self._store is None:
            return False
        while not await asyncio.to_thread(self._store.check, [str(version)]):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(_POLL_S)
        posted: bytes = await asyncio.to_thread(self._store.get, str(version))
        return posted.decode() == _TAKEN


@runtime_checkable
class _CastingPublisher(Protocol):
    """A publisher whose engines have one dtype, so that a copy of the weights is made in it."""

    async def dtype(self) -> str | None:
        """Return the dtype of floating-point weights in the engines, under torch's name; None if there are several."""
        ...
