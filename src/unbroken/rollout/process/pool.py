"""`SamplerPool`: takes samplers in, gives them orders, and gives the orders of one that ended to another.

sample() ──► waiting ──► the sampler with the fewest orders ──► answer
                ▲                     │ ends
                └─────────────────────┘ the same order again
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from unbroken.counters import Effort, get_effort
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
from unbroken.untrusted import read_end

_GREET_S = 10.0
_RETRY_S = 0.1
_END_S = 15.0
"""How long a process may take to end by itself."""
_MAX_DEATHS = 5
"""In a row, of a local sampler that has finished no group in between."""
_MAX_DEATHS_OF_ORDER = 3
_SHOWN_BYTES = 2000
"""Of a log, in an error."""
_logger = logging.getLogger(__name__)


StartLocal: TypeAlias = Callable[[str, Path], Awaitable[asyncio.subprocess.Process]]
"""Starts a local sampler, in its own session, by its name and the file for its output."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Order:
    number: int
    name: str
    content: Any
    answer: asyncio.Future[TrajectoryGroup | None]
    """None: it was cancelled, and nothing of it runs any more."""
    effort: Effort | None
    member: _Member | None = None
    is_cancelled: bool = False
    num_deaths: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    name: str
    channel: Channel
    process: asyncio.subprocess.Process | None
    """That of a local sampler."""
    orders: dict[int, _Order] = field(default_factory=dict)


class SamplerPool:
    """Samples groups in other processes. Made by `start`, then opened."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        key: str,
        identity: Mapping[str, str],
        logs: Mapping[str, Path],
        start_local: StartLocal,
    ) -> None:
        self._listener = listener
        self._key = key.encode()
        self._identity = identity
        self._logs = logs
        """Of the local samplers, by their names."""
        self._start_local = start_local
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._facts: asyncio.Future[Any] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        """Whether all local samplers have opened, or without any the first that joined."""
        self._members: list[_Member] = []
        self._orders: dict[int, _Order] = {}
        """Those whose answers are awaited."""
        self._waiting: deque[_Order] = deque()
        """Those that no sampler has."""
        self._num_orders = 0
        self._news: dict[Hashable, Any] = {}
        self._has_finished: set[str] = set()
        """Local samplers that finished a group since they were started."""
        self._failure: Exception | None = None

    @classmethod
    async def start(cls, listener: socket.socket, **options: Any) -> SamplerPool:
        """Start the local samplers that `logs` names, and take in all that connect to `listener` and have the `key`.

        A sampler must have the same `identity`: another one that is local ends the pool, one from elsewhere is refused.
        """
        pool = cls(listener, **options)
        os.register_at_fork(after_in_child=listener.close)
        pool._spawn(pool._accept())
        for name, log in pool._logs.items():  # before the caller is busy with other things
            pool._processes[name] = await pool._start_local(name, log)
            pool._spawn(pool._keep(name))
        return pool

    async def open(self, facts: Any) -> None:
        """Have samplers open their work with these facts, until there are enough; raises as the work of a local one."""
        self._facts.set_result(facts)
        await asyncio.shield(self._ready)

    async def sample(self, order: Any, *, name: str) -> TrajectoryGroup:
        """Sample an order, which errors call by its name. A call that is cancelled returns once nothing of it runs.

        Raises:
            RolloutError: local samplers or this order's ended again and again, or the work cancels itself.
            Exception: as the work does.
        """
        if self._failure is not None:
            raise self._failure
        number, self._num_orders = self._num_orders, self._num_orders + 1
        answer: asyncio.Future[TrajectoryGroup | None] = asyncio.get_running_loop().create_future()
        own = _Order(number=number, name=name, content=order, answer=answer, effort=get_effort())
        self._orders[number] = own
        self._waiting.append(own)
        self._assign()
        try:
            group = await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done():
                await self._cancel(own)
            raise
        finally:
            del self._orders[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # of an order that was cancelled, which nobody asks for
        if group is None:
            raise to_exception(asyncio.CancelledError())
        return group

    def tell(self, key: Hashable, news: Any) -> None:
        """Send news to all samplers, and to those that come later; newer ones replace those of the same key."""
        self._news[key] = news
        for member in self._members:
            member.channel.send(News(news))

    async def close(self) -> None:
        """End the local samplers, and let the others go. Idempotent."""
        self._fail(RolloutError("the samplers are closed"))
        for task in self._tasks:
            task.cancel()  # closes its connection: so the sampler ends
        connected = {member.name for member in self._members}
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        await asyncio.gather(
            *(_end(process, _END_S if name in connected else 0.0) for name, process in self._processes.items())
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._check_task)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(to_exception(error))

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        waiting: list[asyncio.Future[Any]] = [self._ready, *(order.answer for order in self._orders.values())]
        for each in waiting:
            if not each.done():
                each.set_exception(failure)
        self._ready.exception()  # perhaps nobody waits for it
        self._waiting.clear()

    async def _keep(self, name: str) -> None:
        """Start a local sampler again whenever it ends."""
        num_deaths = 0
        while True:
            status = await self._processes[name].wait()
            _kill_group(self._processes[name])
            num_deaths = 1 if name in self._has_finished else num_deaths + 1
            if self._failure is None and num_deaths == _MAX_DEATHS:
                self._fail(
                    RolloutError(
                        f"sampler {name} ended {num_deaths} times in a row before it had finished a group, at last "
                        f"with status {status}: {self._show_log(name)}"
                    )
                )
            await asyncio.sleep(num_deaths - 1)
            if self._failure is not None:
                return
            self._has_finished.discard(name)
            self._processes[name] = await self._start_local(name, self._logs[name])

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:  # it has gone again, or there are too many open files
                _logger.warning("a sampler could not connect: %s", error)
                await asyncio.sleep(_RETRY_S)
            else:
                self._spawn(self._attend(connection, address[0]))

    async def _attend(self, connection: socket.socket, peer: str) -> None:
        """Take in whoever has connected, until it ends."""
        close = connection.close
        try:
            reader, writer = await connect(connection)
            channel, close = Channel(reader, writer), writer.close
            async with asyncio.timeout(_GREET_S):
                await greet(reader, writer, self._key, is_server=True)
                hello = await channel.receive()
            member = _Member(name=hello.name, channel=channel, process=self._processes.get(hello.name))
            if await self._open(member, hello):
                await self._serve(member)
        except InvalidInputError as error:
            _logger.warning("a process at %s is no sampler of this run: %s", peer, error)
        except (EOFError, OSError) as error:  # TimeoutError is one
            _logger.info("a process at %s did not become a sampler: %s", peer, format_error(error))
        finally:
            close()

    async def _open(self, member: _Member, hello: Hello) -> bool:
        """Whether a sampler is one of this run, and has opened its work."""
        if difference := _compare(self._identity, hello.identity):
            error: Exception = InvalidInputError(f"a sampler must open the recipe as its trainer did: {difference}")
            member.channel.send(Failed(None, error))
        else:
            member.channel.send(Open(await self._facts))
            answer = await member.channel.receive()
            if isinstance(answer, Opened):
                return True
            error = answer.error
        has_opened = self._ready.done() and self._failure is None
        if member.name in self._logs and (isinstance(error, InvalidInputError) or not has_opened):
            self._fail(error)
        else:
            _logger.warning("sampler %s is not used: %s", member.name, format_error(error))
        return False

    async def _serve(self, member: _Member) -> None:
        self._members.append(member)
        _logger.info("sampler %s has joined", member.name)
        for news in self._news.values():
            member.channel.send(News(news))
        if len(self._members) >= (len(self._logs) or 1) and not self._ready.done():
            self._ready.set_result(None)
        self._assign()
        message: Any = None
        try:
            while not isinstance(message, Leave):
                message = await member.channel.receive()
                self._take(member, message)
        except EOFError:
            pass
        except Exception as error:
            self._fail(RolloutError(f"sampler {member.name} sent what cannot be read: {format_error(error)}"))
        finally:
            self._members.remove(member)
        await self._give_again(member, is_death=not isinstance(message, Leave))

    async def _give_again(self, member: _Member, *, is_death: bool) -> None:
        """Give what a sampler has not finished to others."""
        status = ""
        if is_death and member.process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(member.process.wait(), _END_S)
            status = f" with status {member.process.returncode}"
        lost = [order for order in member.orders.values() if not order.is_cancelled]
        _logger.warning("sampler %s has ended%s; %d groups are sampled again", member.name, status, len(lost))
        for order in member.orders.values():
            if order.is_cancelled and not order.answer.done():
                order.answer.set_result(None)
            order.member = None
            order.num_deaths += is_death
        member.orders.clear()
        if killers := [order.name for order in lost if order.num_deaths >= _MAX_DEATHS_OF_ORDER]:
            self._fail(
                RolloutError(
                    f"{', '.join(killers[:5])}: {_MAX_DEATHS_OF_ORDER} samplers have ended while they sampled it, at "
                    f"last {member.name}{status}: {self._show_log(member.name)}"
                )
            )
        elif self._failure is None:
            self._waiting.extendleft(reversed(lost))
            self._assign()

    def _assign(self) -> None:
        while self._waiting and self._members:
            order = self._waiting.popleft()
            member = min(self._members, key=lambda each: len(each.orders))
            order.member, member.orders[order.number] = member, order
            member.channel.send(Order(order.number, order.content))

    async def _cancel(self, order: _Order) -> None:
        """Cancel an order, and wait until nothing of it runs."""
        order.is_cancelled = True
        if order.member is None:
            self._waiting.remove(order)
        else:
            order.member.channel.send(Cancel(order.number))
            await asyncio.wait([order.answer])

    def _take(self, member: _Member, message: Any) -> None:
        if isinstance(message, Sampled):
            if (sampling := member.orders.get(message.number)) is not None and sampling.effort is not None:
                sampling.effort.add(message.num_ids)
        elif isinstance(message, (Finished, Cancelled, Failed)) and message.number is not None:
            order = member.orders.pop(message.number)
            if isinstance(message, Finished):
                self._has_finished.add(member.name)
            if order.answer.done():  # the pool has failed, or it was cancelled twice
                return
            match message:
                case Finished(_, group):
                    order.answer.set_result(group)
                case Failed(_, error) if not order.is_cancelled:
                    order.answer.set_exception(error)
                case _:
                    order.answer.set_result(None)

    def _show_log(self, name: str) -> str:
        """What the log of a local sampler ends with."""
        log = self._logs.get(name)
        if log is None:
            return "its own log says why"
        end = read_end(log, max_bytes=_SHOWN_BYTES).strip()
        return f"{log} ends with\n{end}" if end else f"{log} is empty"


def _compare(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs, in words; "" if nothing does."""
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} is {theirs.get(name)} there, and {ours.get(name)} in the trainer" for name in names)


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    """End a process within a time, and what is left of its group."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    _kill_group(process)
    await process.wait()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process that leads a session, and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
