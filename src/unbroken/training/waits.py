"""What a run waits for: its other processes, in a thread, so its event loop runs; what takes long, in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from unbroken.training.trainer import Trainer

_T = TypeVar("_T")
_AFTER_S = 10.0
_EVERY_S = 60.0
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
async def fail_together(trainer: Trainer) -> AsyncIterator[None]:
    """Run a block in every process; if it fails in one, raise on all (`Trainer.fail_together`)."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    await raise_together(trainer, failure)


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
