"""Tells the processes of a run that their engine has new weights, without a collective: one of them publishes for all.

process 0    publish version 4 ──► post(4)                    the trainers may be in the middle of a step,
process 1    wait_for(4) ──► sampler: groups may start        in which no process may wait for another
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from unbroken.training.agreement import from_all_processes
from unbroken.training.trainer import Trainer

_POLL_S = 0.01
_TAKEN, _FAILED = "taken", "failed"


class Notices:
    """What became of each version, in the key-value store that the processes met in. Made by `open`."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    @classmethod
    async def open(cls, trainer: Trainer) -> Notices:
        """Agree with the other processes on keys that no other run of theirs uses."""
        name = (await from_all_processes(trainer, uuid4().hex))[0]
        if not torch.distributed.is_initialized():
            return cls(None)
        return cls(PrefixStore(f"unbroken/published/{name}", _get_default_store()))

    async def post(self, version: int, *, is_taken: bool) -> None:
        """Tell the others whether the engine has taken this version."""
        if self._store is not None:
            await asyncio.to_thread(self._store.set, str(version), _TAKEN if is_taken else _FAILED)

    async def wait_for(self, version: int) -> bool:
        """Wait until another process has posted what became of this version, and return whether it was taken."""
        if self._store is None:
            return False
        while not await asyncio.to_thread(self._store.check, [str(version)]):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(_POLL_S)
        posted: bytes = await asyncio.to_thread(self._store.get, str(version))
        return posted.decode() == _TAKEN
