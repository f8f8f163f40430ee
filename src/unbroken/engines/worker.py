"""The thread that a model runs in: commands between steps, steps while there is work, one at a time.

Callers wait on futures, so they may live in any event loop, and nothing of the model blocks one. The command queue has
no bound of its own: each entry is a caller that waits for its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from unbroken.errors import EngineError, InvalidInputError

_T = TypeVar("_T")


class Workload(Protocol):
    """What the worker drives; called from its thread only."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> None:
        """Do one step."""
        ...

    def fail_all(self, cause: BaseException) -> None:
        """Tell everybody who waits that the engine failed."""
        ...


class Worker:
    """Runs a workload in a thread of its own, from the first command until `stop` or a failure."""

    def __init__(self, workload: Workload, *, name: str) -> None:
        self._workload = workload
        self._name = name
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._ended: EngineError | None = None
        self._paused = False
        self._stopping = False

    def call(self, command: Callable[[], _T]) -> Future[_T]:
        """Run `command` between two steps.

        An `InvalidInputError` is the caller's; any other exception means the model may be in any state, and ends the
        worker like a failed step does.

        Raises:
            EngineError: the worker was stopped or has failed.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._ended is not None:
                raise self._ended_error()
            if not self._started:
                self._started = True
                # A daemon: an engine that nobody closed must not keep the interpreter from ending.
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._commands.put((command, future))
        return future

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
                runnable = self._workload.has_work and not self._paused
                self._run_commands(wait=not runnable)
                if self._workload.has_work and not self._paused and not self._stopping:
                    self._workload.step()
            self._end(EngineError("the engine is closed"))
        except Exception as error:  # whoever waits must learn of it: nothing may hang on a dead thread
            ended = EngineError(f"the engine failed earlier and samples no more: {error!r}")
            ended.__cause__ = error
            self._end(ended)
            self._workload.fail_all(error)

    def _run_commands(self, *, wait: bool) -> None:
        """Run what is queued; with `wait`, at least one."""
        while not self._stopping:  # what comes after a stop is refused: nothing would ever finish it
            try:
                command, future = self._commands.get(block=wait)
            except Empty:
                return
            wait = False
            try:
                future.set_result(command())
            except InvalidInputError as error:
                future.set_exception(error)
            except Exception as error:
                failure = EngineError(f"the engine failed: {error!r}")
                failure.__cause__ = error
                future.set_exception(failure)
                raise

    def _end(self, error: EngineError) -> None:
        """Refuse commands from here on, and answer those that are queued."""
        with self._lock:
            self._ended = error
        while True:
            try:
                _, future = self._commands.get_nowait()
            except Empty:
                return
            future.set_exception(self._ended_error())

    def _ended_error(self) -> EngineError:
        """A fresh copy for each caller: an exception raised twice would mix their tracebacks."""
        assert self._ended is not None
        error = EngineError(*self._ended.args)
        error.__cause__ = self._ended.__cause__
        return error
