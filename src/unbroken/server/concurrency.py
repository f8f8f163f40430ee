"""Running calls and merging streams concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_all(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run calls concurrently and return their results in order. The first failure cancels the others and is raised.

    Give a generator: a coroutine that was made before a failure, and is then not run, is a warning of Python.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for call in calls:
                tasks.append(group.create_task(call))
                await asyncio.sleep(0)  # let other requests run between the calls of a large batch
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge_streams(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """Yield the items of all streams as they arrive, each with the index of its stream.

    Streams of `a b` and `x` give `(0, a) (1, x) (0, b)` or another order with `a` before `b`. At most one item per
    stream is buffered, so a slow reader holds all streams back. The first failure ends the others, and leaving the
    iteration closes all. This is not a `TaskGroup`, which raises when its generator is closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue()
    slots = [asyncio.Semaphore(1) for _ in streams]
    tasks = [
        asyncio.create_task(_feed(queue, slot, index, stream))
        for index, (slot, stream) in enumerate(zip(slots, streams, strict=True))
    ]
    num_open = len(tasks)
    try:
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case index, item:
                    slots[index].release()
                    yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, _T] | Exception | None],
    slot: asyncio.Semaphore,
    index: int,
    stream: AsyncGenerator[_T],
) -> None:
    """Put a stream's items into the queue, then its error or None."""
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await slot.acquire()
                queue.put_nowait((index, item))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
