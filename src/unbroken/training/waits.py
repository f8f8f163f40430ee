"""What a run waits for: its other processes, in a thread, so its event loop runs; what takes long, in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from unbroken.training.trainer import Trainer

_T = TypeVar("_T")
_AFTER_S = 10.0
_EVERY_S = 60.0
_POLL_S = 0.01
_TAKEN, _FAILED = "taken", "failed"
_logger = logging.getLogger(__name__)


async def in_any_process(trainer: Trainer | None, flag: bool) -> bool:
    """Whether the flag is set in any process (`Trainer.in_any_process`); without a trainer there is one process."""
    return flag if trainer is None else await asyncio.to_thread(trainer.in_any_process, flag)


async def from_all_processes(trainer: Trainer, value: _T) -> list[_T]:
    """The values of all processes, in their order (`Trainer.from_all_processes`)."""
    return await asyncio.to_thread(trainer.from_all_processes, value)


async def raise_together(trainer: Trainer, failure: Exception | None) -> None:
    """If a process has a failure, raise it there, and a `TrainingError` with its text on the others."""
    await asyncio.to_thread(trainer.finish_together, (), failure)


@asynccontextmanager
async def fail_together(trainer: Trainer, weights: Iterable[tuple[str, torch.Tensor]] = ()) -> AsyncIterator[None]:
    """Run a block in every process; if it fails in one, raise on all (`Trainer.finish_together`). What the block leaves
    of `weights`, which processes gather together, is gathered then.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    await asyncio.to_thread(trainer.finish_together, weights, failure)


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
        """Wait until another process has announced what became of this version, and return whether it was taken; in a
        run of one process there is no engine to take it.
        """
        if self._store is None:
            return True
        while not await asyncio.to_thread(self._store.check, [str(version)]):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(_POLL_S)
        posted: bytes = await asyncio.to_thread(self._store.get, str(version))
        return posted.decode() == _TAKEN


@asynccontextmanager
async def log_waiting(purpose: str) -> AsyncIterator[None]:
    """Log a warning once the block has taken 10 s, and every minute from then on: "waiting for PURPOSE"."""
    warn = asyncio.create_task(_warn(purpose))
    try:
        yield
    finally:
        warn.cancel()


async def _warn(purpose: str) -> None:
    started = time.monotonic()
    await asyncio.sleep(_AFTER_S)
    while True:
        _logger.warning("waiting for %s, for %.0f s so far", purpose, time.monotonic() - started)
        await asyncio.sleep(_EVERY_S)
