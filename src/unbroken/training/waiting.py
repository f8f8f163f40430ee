"""Says in the log what a run waits for, once that takes long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_AFTER_S = 10.0
_EVERY_S = 60.0
_logger = logging.getLogger(__name__)


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
