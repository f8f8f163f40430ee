"""The process of the rollouts: it opens its work, and samples what it is ordered to, until the trainer's ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeAlias

from unbroken.counters import Effort, count_effort
from unbroken.errors import RolloutError
from unbroken.rollout.failures import format_error, to_exception
from unbroken.rollout.process.channel import (
    Cancel,
    Cancelled,
    Channel,
    Failed,
    Finished,
    News,
    Open,
    Opened,
    Order,
    Sampled,
)
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.threads import exit_in

_CLOSE_S = 10.0
"""How long environments and connections may take to close, once the trainer's process is gone or wants no more."""


class Work(Protocol):
    """What samples."""

    async def sample(self, order: Any) -> TrajectoryGroup:
        """Sample a group. A call that is cancelled aborts its requests and closes its environments."""
        ...

    def tell(self, news: Any) -> None:
        """Take note of what the trainer's process says."""
        ...


OpenWork: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Work]]
"""Opens the work, with facts that were not known when the process was forked."""


def run_worker(other_end: socket.socket, end: socket.socket, open_work: OpenWork) -> None:
    """Serve until the other process closes its end, or is gone."""
    other_end.close()  # otherwise the channel would stay open without that process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a forked process
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_parent)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve(end, open_work))


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Ignore a signal that all processes of a terminal or a job get: the trainer's then closes and ends this one.

    Programs that this process starts would inherit `SIG_IGN`; a function they do not.
    """


def _end_with_parent() -> None:
    """End this process soon after the one that forked it, also if user code holds up the event loop."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process is forked"
    parent.join()
    exit_in(_CLOSE_S, status=1)


async def _serve(end: socket.socket, open_work: OpenWork) -> None:
    channel = await Channel.open(end)
    try:
        opening = await channel.receive()
    except EOFError:  # nothing was opened
        return
    assert isinstance(opening, Open), "it comes first"
    try:
        async with open_work(opening.facts) as work:
            channel.send(Opened())
            await _Worker(channel, work).run()
    except Exception as error:
        channel.send(Failed(None, error))
    finally:
        channel.close()


class _Worker:
    def __init__(self, channel: Channel, work: Work) -> None:
        self._channel = channel
        self._work = work
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Do what comes, until the channel is closed; then nothing runs any more."""
        with suppress(EOFError):
            while True:
                self._take(await self._channel.receive())
        exit_in(_CLOSE_S, status=1)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _take(self, message: Any) -> None:
        match message:
            case Order(number, order):
                task = asyncio.create_task(self._sample(number, order))
                self._tasks[number] = task
                task.add_done_callback(partial(self._end, number))
            case Cancel(number):
                if number in self._tasks:
                    self._tasks[number].cancel()
            case News(news):
                self._work.tell(news)

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if task.cancelled():  # perhaps before it has begun
            self._channel.send(Cancelled(number))
        elif (error := task.exception()) is not None:  # none of those that `_sample` has sent
            self._channel.send(Failed(number, to_exception(error)))

    async def _sample(self, number: int, order: Any) -> None:
        try:
            with count_effort(_ReportedEffort(lambda num_ids: self._channel.send(Sampled(number, num_ids)))):
                group = await self._work.sample(order)
            self._send_group(number, group)
        except Exception as error:
            self._channel.send(Failed(number, error))

    def _send_group(self, number: int, group: TrajectoryGroup) -> None:
        try:
            self._channel.send(Finished(number, group))
        except Exception as error:
            raise RolloutError(
                "with rollouts.own_process, messages and rewards must be values that Python can pickle, got "
                f"{format_error(error)}"
            ) from error


class _ReportedEffort(Effort):
    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()
        self._report = report

    def add(self, num_ids: int) -> None:
        self._report(num_ids)
