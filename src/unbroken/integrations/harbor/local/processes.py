"""One command of a task in its sandbox: limits, time-out, and the way to the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor.local.bridge import PORT, Bridge
from unbroken.integrations.harbor.local.sandbox import Sandbox
from unbroken.rollout.agents.processes import read_end, run_process

_LAUNCHER = Path(__file__).with_name("launcher.py")
_MAX_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of each process of a task. All of them together have no limit: that needs a container."""

    output_bytes: int = 10_000_000
    """Of the output of a phase that is kept; what comes after it is read and dropped."""
    file_bytes: int | None = 1_000_000_000
    """Of each file that is written."""
    memory_bytes: int | None = None
    """Of the address space. Some runtimes, such as Node's, reserve much more than they use."""

    def __post_init__(self) -> None:
        for name in ("output_bytes", "file_bytes", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInputError(f"{name} must be a whole number >= 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run, and where."""

    words: Sequence[str]
    root: Path
    """The task's root folder."""
    workdir: str
    variables: Mapping[str, str]
    """All of its environment variables: none of this machine's are added, apart from HOME."""
    output: Path
    errors: Path
    has_network: bool = False
    """Whether it gets this machine's network."""


async def run_command(
    command: Command,
    sandbox: Sandbox,
    limits: ProcessLimits,
    *,
    timeout_s: float | None,
    bridge: Bridge | None = None,
) -> int:
    """Run a command of a task to its end; returns its exit status.

    When it ends, all processes that it started are ended too.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
        InvalidInputError: its program cannot be started.
        TaskError: the sandbox failed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
        stack.enter_context(ours)
        stack.enter_context(theirs)
        running = asyncio.create_task(_start(command, sandbox, limits, theirs, port=PORT if bridge else 0))
        stack.push_async_callback(_end, running)
        await _wait_for_message(ours, running)
        message, listener = _receive(ours)
        if bridge is not None and listener is not None:
            await stack.enter_async_context(bridge.serving(listener))
        status = await running
        if message != b"S":
            raise TaskError(f"the sandbox failed: {read_end(command.errors, command.output)}")
        message, _ = _receive(ours)
        if message.startswith(b"E"):
            raise InvalidInputError(
                f"command must be a program that the task's sandbox can run: {message[1:].decode(errors='replace')}"
            )
        return status


async def _end(running: asyncio.Task[int]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _wait_for_message(control: socket.socket, running: asyncio.Task[int]) -> None:
    """Wait until the launcher says something, or has ended."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not arrived.done():
            arrived.set_result(None)

    loop.add_reader(control, note)
    try:
        waiting: list[asyncio.Future[Any]] = [arrived, running]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(control)


def _receive(control: socket.socket) -> tuple[bytes, socket.socket | None]:
    """The next message, empty at the end, and the socket that came with it."""
    try:
        message, sockets, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
    except BlockingIOError:
        return b"", None
    return message, socket.socket(fileno=sockets[0]) if sockets else None


async def _start(
    command: Command, sandbox: Sandbox, limits: ProcessLimits, control: socket.socket, *, port: int
) -> int:
    settings = {
        "control": control.fileno(),
        "port": port,
        "file_bytes": limits.file_bytes or 0,
        "memory_bytes": limits.memory_bytes or 0,
    }
    launcher = [sandbox.python, "-I", "-S", "-c", _LAUNCHER.read_text("utf-8"), json.dumps(settings)]
    words, folder = sandbox.wrap(
        [*launcher, *command.words], root=command.root, workdir=command.workdir, has_network=command.has_network
    )
    variables = {"HOME": sandbox.locate(command.root, "/root"), **command.variables}
    return await run_process(
        words,
        folder=folder,
        variables=variables,
        output=command.output,
        errors=command.errors,
        max_output_bytes=limits.output_bytes,
        pass_fds=[control.fileno()],
    )
