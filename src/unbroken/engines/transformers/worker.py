"""The thread that runs the model: commands between steps, steps while there is work, one at a time.

Callers wait for answers in any event loop, and the model blocks none of them. An `Answer` comes once; a `Feed` brings
many items, and each is delivered with the answers of its step: one wake-up per loop for all of them. A wake-up costs a
system call and a wait for the interpreter lock; with a small model, one for each finished request would cost as much as
sampling it. The command queue needs no bound: each entry has a caller who waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from unbroken.errors import EngineError, UnbrokenError

_T = TypeVar("_T")


class Outbox:
    """Holds answers until `flush`. Used by one thread; `Answer`s are made in the callers' event loops."""

    def __init__(self) -> None:
        self._deliveries: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    def add(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[], None]) -> None:
        """Call `deliver` in `loop` with the next flush, after what was added before."""
        self._deliveries.append((loop, deliver))

    def flush(self) -> None:
        """Wake every event loop that has deliveries."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
        for loop, deliver in self._deliveries:
            by_loop[loop].append(deliver)
        self._deliveries.clear()
        for loop, deliveries in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: no caller waits in it
                loop.call_soon_threadsafe(_call_all, deliveries)


class Answer(Generic[_T]):
    """The answer to one caller, who awaits `future` in its loop; another thread resolves or fails it once."""

    def __init__(self, outbox: Outbox) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_T] = self.loop.create_future()
        self._outbox = outbox
        self._value: _T | None = None
        self._error: Exception | None = None

    def resolve(self, value: _T) -> None:
        """Return `value` to the caller."""
        self._value = value
        self._outbox.add(self.loop, self._deliver)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the caller."""
        self._error = error
        self._outbox.add(self.loop, self._deliver)

    def _deliver(self) -> None:
        """Settle the future, in the caller's loop, unless the caller was cancelled."""
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)  # type: ignore[arg-type]  # resolved: _T, which may include None


class Feed(Generic[_T]):
    """Items for one caller, who takes them from `items` in its loop; another thread puts them in.

    The queue needs no bound: a request puts in at most the ids that it may sample.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.items: asyncio.Queue[_T] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox

    def put(self, item: _T) -> None:
        """Send `item` to the caller."""
        self._outbox.add(self._loop, lambda: self.items.put_nowait(item))


def _call_all(deliveries: list[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()


class _Workload(Protocol):
    """The work of a worker; called only from its thread."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> None:
        """Do one step."""
        ...

    def fail_all(self, cause: BaseException) -> None:
        """Fail every request because the engine has failed."""
        ...


class Worker:
    """Runs a workload in its own thread, from the first command until `stop` or a failure."""

    def __init__(self, workload: _Workload, *, name: str) -> None:
        self._workload = workload
        self._name = name
        self._commands: SimpleQueue[tuple[Callable[[], None], Answer[Any]]] = SimpleQueue()
        self._outbox = Outbox()
        self._lock = threading.Lock()
        self._started = False
        self._ended: EngineError | None = None
        self._paused = False
        self._stopping = False

    @property
    def is_paused(self) -> bool:
        """Whether it makes no steps."""
        return self._paused

    async def call(self, command: Callable[[], _T]) -> _T:
        """Run `command` between two steps and return what it returns. See `post`."""
        answer: Answer[_T] = self.new_answer()
        self.post(lambda: answer.resolve(command()), answer)
        return await answer.future

    def new_answer(self) -> Answer[Any]:
        """Make an answer for a caller in the running event loop."""
        return Answer(self._outbox)

    def new_feed(self) -> Feed[Any]:
        """Make a feed for a caller in the running event loop."""
        return Feed(self._outbox)

    def post(self, command: Callable[[], None], answer: Answer[Any]) -> None:
        """Run `command` between two steps; it resolves `answer` itself, then or in a later step.

        If it raises, so does the answer. An `UnbrokenError` concerns only the caller; any other exception means that
        the model may be in any state, and ends the worker as a failed step does. Raises `EngineError` if the worker was
        stopped or has failed.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended_error()
            if not self._started:
                self._started = True
                # A daemon: an engine that was not closed must not keep the interpreter from ending.
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._commands.put((command, answer))

    def check_health(self) -> None:
        """Raise `EngineError` if the worker was stopped or has failed."""
        with self._lock:
            if self._ended is not None:
                raise self._ended_error()

    def pause(self) -> None:
        """A command: make no steps until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """A command: make steps again."""
        self._paused = False

    def stop(self) -> None:
        """A command: end the thread; later commands are refused."""
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands(wait=self._paused or not self._workload.has_work)
                if self._workload.has_work and not self._paused:
                    self._workload.step()
                self._outbox.flush()
            self._end(EngineError("the engine is closed"))
        except BaseException as error:  # SystemExit too: otherwise callers wait forever
            self._workload.fail_all(error)
            self._end(_engine_error("the engine failed earlier and samples no more", error))

    def _run_commands(self, *, wait: bool) -> None:
        """Run the queued commands; with `wait`, at least one. `_end` refuses those after a stop."""
        while not self._stopping:
            try:
                command, answer = self._commands.get(block=wait)
            except Empty:
                return
            wait = False
            try:
                command()
            except UnbrokenError as error:
                answer.fail(error)
            except BaseException as error:
                answer.fail(_engine_error("the engine failed", error))
                raise

    def _end(self, error: EngineError) -> None:
        """Refuse commands from now on, also those that are queued."""
        with self._lock:
            self._ended = error
        while not self._commands.empty():
            _, answer = self._commands.get_nowait()
            answer.fail(self._ended_error())
        self._outbox.flush()

    def _ended_error(self) -> EngineError:
        """Copy the error for each caller: an exception raised twice would mix their tracebacks."""
        assert self._ended is not None
        error = EngineError(*self._ended.args)
        error.__cause__ = self._ended.__cause__
        return error


def _engine_error(message: str, cause: BaseException) -> EngineError:
    error = EngineError(f"{message}: {cause!r}")
    error.__cause__ = cause
    return error
