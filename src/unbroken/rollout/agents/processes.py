"""Processes of agents: a command in a process group of its own, whose output goes to files."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from unbroken.errors import InvalidInputError

_TERM_S = 2.0
"""How long a process tree may take to end by itself."""
_DRAIN_S = 1.0
"""How long the rest of the output may take after the process tree was ended."""
_MAX_END_CHARS = 4000
_CHUNK_BYTES = 1 << 16


async def run_process(
    words: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    output: Path,
    errors: Path,
    max_output_bytes: int | None = None,
    pass_fds: Sequence[int] = (),
) -> int:
    """Run a command without input to its end; returns its exit status.

    When it ends, or this is cancelled, its whole process group is ended too. `output` and `errors` get what it writes,
    at most `max_output_bytes` each, and then a line that says so; they may be the same file.

    Raises:
        InvalidInputError: the program cannot be started.
    """
    async with _writing(output, max_output_bytes) as out, _writing_beside(errors, output, out, max_output_bytes) as err:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder, env=dict(variables),
                start_new_session=True, pass_fds=tuple(pass_fds),
            )
        )  # fmt: skip
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise InvalidInputError(f"command must be a program, got {words[0]!r}: {error}") from None
        except asyncio.CancelledError:  # asyncio would kill the process, but none that it has started
            starting.add_done_callback(_kill_group)
            await asyncio.wait([starting])
            raise
        try:
            return await process.wait()
        finally:
            await _end_group(process)


def read_end(*files: Path) -> str:
    """The end of the first of these files that has any text, for an error."""
    texts = [file.read_text(errors="replace").strip() for file in files if file.exists()]
    return next((text for text in texts if text), "no output")[-_MAX_END_CHARS:]


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of a process group: first politely, if its leader still runs."""
    try:
        if process.returncode is None:
            _signal_group(process, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), _TERM_S)
    finally:  # also if the caller is cancelled once more
        _signal_group(process, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


def _kill_group(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _signal_group(starting.result(), signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@asynccontextmanager
async def _writing(file: Path, max_bytes: int | None) -> AsyncIterator[int]:
    """Yield the end of a pipe to write to; what comes through it goes to the file."""
    read_end_fd, write_end_fd = os.pipe()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    try:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end_fd, "rb", buffering=0)
        )
    except BaseException:
        os.close(write_end_fd)
        raise
    copying = asyncio.create_task(_copy(reader, file, max_bytes))
    try:
        yield write_end_fd
    finally:
        os.close(write_end_fd)
        try:
            # A process that left its group may hold the pipe open for ever.
            await asyncio.wait([copying], timeout=_DRAIN_S)
        finally:
            copying.cancel()
            transport.close()
        with suppress(asyncio.CancelledError):
            await copying


@asynccontextmanager
async def _writing_beside(file: Path, other: Path, pipe: int, max_bytes: int | None) -> AsyncIterator[int]:
    """As `_writing`; for the same file as another one's, the same pipe."""
    if file == other:
        yield pipe
        return
    async with _writing(file, max_bytes) as own:
        yield own


async def _copy(reader: asyncio.StreamReader, file: Path, max_bytes: int | None) -> None:
    left = max_bytes
    with file.open("wb", buffering=0) as written:
        while chunk := await reader.read(_CHUNK_BYTES):
            if left is None:
                written.write(chunk)
            elif left > 0:
                written.write(chunk[:left])
                left -= len(chunk)
                if left < 0:
                    written.write(f"\n[more than {max_bytes} bytes of output: the rest is not kept]\n".encode())
