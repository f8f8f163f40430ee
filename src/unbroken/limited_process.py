"""Calls a function in a separate process, which is killed if a call takes too long or too much memory.

A chat template is a program from outside, and Jinja's sandbox bounds neither its time nor its memory:

    {% for i in range(99999) %}{% for j in range(99999) %}..    stopped at the deadline
    {{ 7 ** (10 ** 12) }}                                        the same, inside a single operation of Python
    {% set x = x ~ x %}, a hundred times                         stopped at the memory limit
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar, cast

from unbroken.errors import InvalidInputError, TemplateError, UnbrokenError

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of a process."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """For each call."""
    memory_bytes: int = 4 << 30
    """Address space beyond what the process has when it starts. Enforced on Linux only."""

    def __post_init__(self) -> None:
        if not (0 < self.timeout_s < math.inf and self.memory_bytes > 0):
            raise InvalidInputError(f"limits of a process must be positive and finite, got {self}")


class LimitedProcess(Generic[T]):
    """A process that is started when it is first called, and again after one that was stopped. Threads take turns."""

    def __init__(
        self, work: Callable[..., T], limits: ProcessLimits, *, name: str, preload: Sequence[str], advice: str = ""
    ) -> None:
        """Prepare it; `name` and `advice` are for errors.

        `work` is a function of a module. The modules `preload` are imported once, by the server that processes are
        forked from.
        """
        self._work, self._limits, self._name, self._advice = work, limits, name, advice
        self._preload = list(preload)
        self._process: Any = None
        self._connection: Connection | None = None
        self._lock = Lock()

    def call(self, *arguments: Any) -> T:
        """What the function returns.

        Raises the `UnbrokenError` that it raises, and `TemplateError` if a limit was hit or the process crashed.
        """
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send(arguments)
                if not connection.poll(self._limits.timeout_s):
                    raise TemplateError(
                        f"{self._name} took longer than {self._limits.timeout_s:g} s and was stopped: the template has "
                        f"a loop without an end, or is very slow{self._advice}"
                    )
                outcome = connection.recv()
            except (EOFError, ConnectionError):
                self._process.join(1)
                code = self._process.exitcode
                self._end()
                raise TemplateError(
                    f"the process of {self._name} ended without a report, with exit code {code}: the template exceeded "
                    "a limit of the operating system or crashed the interpreter"
                ) from None
            except BaseException:
                self._end()
                raise
        if isinstance(outcome, UnbrokenError):
            raise outcome
        return cast(T, outcome)

    def close(self) -> None:
        """Kill the process, if one runs."""
        with self._lock:
            self._end()

    def _start(self) -> Connection:
        context = _get_context(self._preload)
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._work, self._limits, self._name), daemon=True)
        self._process.start()
        other.close()
        return self._connection

    def _end(self) -> None:
        if self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._connection = None


def _get_context(preload: Sequence[str]) -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _serve(connection: Connection, work: Callable[..., Any], limits: ProcessLimits, name: str) -> None:
    """Answer calls until the other side closes; the main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent kills this process on Ctrl-C.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Each thread reserves address space.
    _limit_memory(limits.memory_bytes)
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        _limit_cpu(limits.timeout_s)
        try:
            outcome = work(*arguments)
        except UnbrokenError as error:
            outcome = error
        except MemoryError:
            outcome = TemplateError(
                f"{name} needs more than {limits.memory_bytes / (1 << 30):.1f} GiB of memory and was stopped: "
                "the template makes very large values"
            )
        connection.send(outcome)


def _limit_memory(num_bytes: int) -> None:
    try:
        import resource

        num_pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (ImportError, OSError):
        return  # Not Linux: the deadline still holds.
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = num_pages * resource.getpagesize() + num_bytes
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(timeout_s: float) -> None:
    """Limit CPU time from now on, in case the parent dies and cannot kill this process."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
