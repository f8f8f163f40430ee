"""Waits for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def wait_until(holds: Callable[[], Any]) -> None:
    """Wait until a condition holds, which may be a coroutine; a minute at most, so that no test hangs."""
    async with asyncio.timeout(60):
        while not (await found if inspect.isawaitable(found := holds()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
