"""Meetings of the processes of a run, in a thread: the event loop of one that waits for the others goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from unbroken.training.trainer import Trainer

_T = TypeVar("_T")


async def in_any_process(trainer: Trainer, flag: bool) -> bool:
    """Whether the flag is set in any process (`Trainer.in_any_process`)."""
    return await asyncio.to_thread(trainer.in_any_process, flag)


async def from_all_processes(trainer: Trainer, value: _T) -> list[_T]:
    """The values of all processes, in their order (`Trainer.from_all_processes`)."""
    return await asyncio.to_thread(trainer.from_all_processes, value)


async def raise_together(trainer: Trainer, failure: Exception | None) -> None:
    """If a process has a failure, raise it there, and a `TrainingError` with its text on the others."""
    await asyncio.to_thread(trainer.finish_together, (), failure)


@asynccontextmanager
async def fail_together(trainer: Trainer) -> AsyncIterator[None]:
    """Run a block in every process; if it fails in one, raise on all (`Trainer.fail_together`)."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    await raise_together(trainer, failure)
