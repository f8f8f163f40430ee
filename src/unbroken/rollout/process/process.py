"""`RolloutProcess`: forks the process of the rollouts, orders groups from it, and ends it."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import warnings
from multiprocessing.process import BaseProcess
from typing import Any

from unbroken.counters import Effort, get_effort
from unbroken.errors import InvalidInputError, RolloutError
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
from unbroken.rollout.process.worker import OpenWork, run_worker
from unbroken.rollout.trajectory import TrajectoryGroup

_JOIN_S = 15.0
"""How long the process may take to end by itself."""


class RolloutProcess:
    """A process that samples groups. Made by `fork`, then opened; what it runs ends with the process that made it."""

    def __init__(self, process: BaseProcess, end: socket.socket) -> None:
        self._process = process
        self._end = end
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self._orders: dict[int, tuple[asyncio.Future[TrajectoryGroup | None], Effort | None]] = {}
        self._num_orders = 0
        self._failure: RolloutError | None = None

    @classmethod
    def fork(cls, open_work: OpenWork) -> RolloutProcess:
        """Fork the process, which has all that this one has, but for its threads: so fork early.

        `open_work` runs there, and must not use a GPU.

        Raises:
            InvalidInputError: this system has no fork.
        """
        if "fork" not in multiprocessing.get_all_start_methods():
            raise InvalidInputError("rollouts.own_process needs a system that can fork processes, such as Linux")
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("fork").Process(
            target=run_worker, args=(ours, theirs, open_work), name="unbroken-rollouts"
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of locks that other threads hold at this moment: the work takes none that they have.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
            process.start()
        theirs.close()
        return cls(process, ours)

    async def open(self, facts: Any) -> None:
        """Open the work; raises as it does."""
        self._channel = await Channel.open(self._end)
        self._opened = asyncio.get_running_loop().create_future()
        self._channel.send(Open(facts))
        self._reading = asyncio.create_task(self._read(self._channel))
        await self._opened

    async def sample(self, order: Any) -> TrajectoryGroup:
        """Let the work sample an order. A call that is cancelled returns once nothing of it runs there.

        Raises:
            RolloutError: the process is gone, or the work cancels itself.
            Exception: as the work does.
        """
        answer: asyncio.Future[TrajectoryGroup | None] = asyncio.get_running_loop().create_future()
        number, self._num_orders = self._num_orders, self._num_orders + 1
        self._orders[number] = answer, get_effort()
        try:
            self._send(Order(number, order))
            try:
                group = await asyncio.shield(answer)
            except asyncio.CancelledError:
                if self._failure is None:
                    self._send(Cancel(number))
                    await asyncio.wait([answer])
                raise
        finally:
            del self._orders[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # of an order that was cancelled, which nobody asks for
        if group is None:
            raise to_exception(asyncio.CancelledError())
        return group

    def tell(self, news: Any) -> None:
        """Send news to the work; nothing, if the process is gone."""
        if self._failure is None:
            self._send(News(news))

    async def close(self) -> None:
        """End the process and what it runs. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._fail(RolloutError("the process of the rollouts is closed"))
        if self._channel is not None:
            self._channel.close()
        else:
            self._end.close()
        await asyncio.to_thread(self._process.join, _JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    def _send(self, message: Any) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._channel is not None, "it is opened first"
        self._channel.send(message)

    async def _read(self, channel: Channel) -> None:
        try:
            while True:
                self._take(await channel.receive())
        except EOFError:
            await asyncio.to_thread(self._process.join, _JOIN_S)
            self._fail(
                RolloutError(
                    f"the process of the rollouts ended with status {self._process.exitcode}: its own output says why, "
                    "or the system's log if its memory was used up"
                )
            )
        except Exception as error:
            self._fail(RolloutError(f"the process of the rollouts sent what cannot be read: {format_error(error)}"))

    def _fail(self, failure: RolloutError) -> None:
        self._failure = self._failure or failure
        waiting: list[asyncio.Future[Any]] = [answer for answer, _ in self._orders.values()]
        if self._opened is not None:
            waiting.append(self._opened)
        for each in waiting:
            if not each.done():
                each.set_exception(failure)

    def _take(self, message: Any) -> None:
        match message:
            case Opened():
                assert self._opened is not None
                self._opened.set_result(None)
            case Failed(None, error):
                assert self._opened is not None
                if not self._opened.done():
                    self._opened.set_exception(error)
            case Sampled(number, num_ids):
                if number in self._orders and (effort := self._orders[number][1]) is not None:
                    effort.add(num_ids)
            case Finished(number, group) if (answer := self._find_waiting(number)) is not None:
                answer.set_result(group)
            case Cancelled(number) if (answer := self._find_waiting(number)) is not None:
                answer.set_result(None)
            case Failed(int(number), error) if (answer := self._find_waiting(number)) is not None:
                answer.set_exception(error)

    def _find_waiting(self, number: int) -> asyncio.Future[TrajectoryGroup | None] | None:
        """The answer that an order still waits for; None if it was cancelled twice, and waits for none."""
        answer, _ = self._orders.get(number, (None, None))
        return None if answer is None or answer.done() else answer
