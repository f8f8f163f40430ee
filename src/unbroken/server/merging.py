"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def merged(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """The items of all streams as they come, each after the index of its stream.

    A stream waits until its item is taken, so that a slow reader holds all of them back. The first that fails ends the
    others, and leaving the iteration closes all. Not a `TaskGroup`: one that is left by a generator's close raises.

    Example: streams of `a b` and `x` give `(0, a) (1, x) (0, b)` or another order in which `a` comes before `b`.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, _T] | BaseException | None] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_feed(queue, index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case BaseException() as error:
                    raise error
                case entry:
                    yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, _T] | BaseException | None], index: int, stream: AsyncGenerator[_T]
) -> None:
    """Put a stream's items, then its error or None."""
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
