"""Tells the processes of a run that their engine has new weights, without a collective: one of them publishes for all.

process 0    announce(4): publish version 4                   the trainers may be in the middle of a step,
process 1    wait_for(4) ──► sampler: groups may start        in which no process may wait for another
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from unbroken.training.agreement import from_all_processes
from unbroken.training.trainer import Trainer

_POLL_S = 0.01
_TAKEN, _FAILED = "taken", "failed"


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
