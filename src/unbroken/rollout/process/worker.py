"""A sampler: it connects to the trainer's process, opens its work, and samples what it is ordered to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeAlias

from unbroken.counters import Effort, count_effort
from unbroken.errors import InvalidInputError, RolloutError
from unbroken.rollout.failures import format_error, to_exception
from unbroken.rollout.process.channel import (
    Cancel,
    Cancelled,
    Channel,
    Failed,
    Finished,
    Hello,
    Leave,
    News,
    Open,
    Opened,
    Order,
    Sampled,
    connect,
    greet,
)
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.threads import exit_in

_CLOSE_S = 10.0
"""How long environments and connections may take to close, once the trainer's process is gone or wants no more."""
_CONNECT_S = 10.0
_RETRY_S = 0.5


class Work(Protocol):
    """What samples."""

    async def sample(self, order: Any) -> TrajectoryGroup:
        """Sample a group. A call that is cancelled aborts its requests and closes its environments."""
        ...

    def tell(self, news: Any) -> None:
        """Take note of what the trainer's process says."""
        ...


OpenWork: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Work]]
"""Opens the work, with the facts that the trainer's process sends."""


def leave_end_to_parent() -> None:
    """Have this process end soon after its parent, and ignore signals that all processes of a job get."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_parent)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. Programs that this process starts would inherit `SIG_IGN`; a function they do not."""


def _end_with(parent: int) -> None:
    """A thread, because user code may hold up the event loop."""
    while os.getppid() == parent:
        time.sleep(1.0)
    exit_in(_CLOSE_S, status=1)


async def serve_orders(address: tuple[str, int], *, key: str, hello: Hello, open_work: OpenWork, wait_s: float) -> None:
    """Sample for the trainer's process at an address until it closes the connection, or is gone.

    Raises:
        InvalidInputError: it has another key or another `hello.identity`.
        RolloutError: it does not answer within `wait_s`.
        Exception: as `open_work`.
    """
    channel = await _connect(address, key, wait_s)
    try:
        channel.send(hello)
        await _Worker(channel).run(open_work)
    finally:
        channel.close()


async def _connect(address: tuple[str, int], key: str, wait_s: float) -> Channel:
    until_s = time.monotonic() + wait_s
    while True:
        try:
            connection = await asyncio.to_thread(socket.create_connection, address, _CONNECT_S)
            reader, writer = await connect(connection)
            try:
                async with asyncio.timeout(max(_CONNECT_S, until_s - time.monotonic())):
                    await greet(reader, writer, key.encode(), is_server=False)
            except BaseException:
                writer.close()
                raise
        except InvalidInputError:
            raise InvalidInputError(
                f"the key must be that of the trainer at {address[0]}:{address[1]} (rollouts.key_file), and is another"
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > until_s:
                raise RolloutError(
                    f"no trainer has answered at {address[0]}:{address[1]} for {wait_s:g} s: {format_error(error)}"
                ) from error
            await asyncio.sleep(_RETRY_S)
        else:
            return Channel(reader, writer)


class _Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._work: Work | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    async def run(self, open_work: OpenWork) -> None:
        """Do what comes until the channel is closed; then nothing runs any more."""
        try:
            answer = await self._channel.receive()
        except EOFError:  # the run has ended before it began
            return
        if isinstance(answer, Failed):
            raise answer.error
        assert isinstance(answer, Open), "it comes first"
        main = asyncio.current_task()
        assert main is not None
        reading = asyncio.create_task(self._read(main))
        try:
            async with open_work(answer.facts) as work:
                self._work = work
                self._channel.send(Opened())
                try:
                    await reading
                finally:
                    await self._stop()
        except asyncio.CancelledError:
            if not self._is_closed or main.uncancel():
                raise
        except Exception as error:
            self._channel.send(Failed(None, error))
            raise
        finally:
            reading.cancel()

    async def _read(self, main: asyncio.Task[Any]) -> None:
        try:
            while True:
                self._take(await self._channel.receive())
        except EOFError:
            self._is_closed = True
            if self._work is None:  # it still opens
                main.cancel()

    async def _stop(self) -> None:
        if not self._is_closed:  # this process got SIGTERM
            self._channel.send(Leave())
        exit_in(_CLOSE_S, status=1)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _take(self, message: Any) -> None:
        assert self._work is not None, "nothing is sent before it has opened"
        match message:
            case Order(number, order):
                task = asyncio.create_task(self._sample(self._work, number, order))
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

    async def _sample(self, work: Work, number: int, order: Any) -> None:
        try:
            with count_effort(_ReportedEffort(lambda num_ids: self._channel.send(Sampled(number, num_ids)))):
                group = await work.sample(order)
            self._send_group(number, group)
        except Exception as error:
            self._channel.send(Failed(number, error))

    def _send_group(self, number: int, group: TrajectoryGroup) -> None:
        try:
            self._channel.send(Finished(number, group))
        except Exception as error:
            raise RolloutError(
                "with rollouts.samplers, messages and rewards must be values that Python can pickle, got "
                f"{format_error(error)}"
            ) from error


class _ReportedEffort(Effort):
    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()
        self._report = report

    def add(self, num_ids: int) -> None:
        self._report(num_ids)
