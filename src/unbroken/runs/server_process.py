"""Start a server with a run, and end it with the run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from unbroken.errors import EngineError
from unbroken.runs.folder import open_private
from unbroken.runs.processes import without_launcher
from unbroken.training.waiting import log_waiting

_STOP_S = 90.0
"""How long a server may take to end before it is killed."""
_POLL_S = 0.1
_SERVES = re.compile(rb"serves .* at (http://\S+)\s")


@asynccontextmanager
async def start_server(command: Sequence[str], log: Path, *, wait_s: float = 600.0) -> AsyncIterator[str]:
    """Run `command` in its own process during the block; yields the URL that it serves.

    The URL is read from `log`, which gets the server's output: a pipe that nothing reads would fill up and block it.

    Raises:
        EngineError: the server ends before it serves, or does not serve within `wait_s`.
    """
    with open_private(log, "ab") as output, without_launcher():
        begin = output.tell()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the server
        )
    try:
        shown = " ".join(command)
        try:
            async with asyncio.timeout(wait_s), log_waiting(f"the server to start, which writes to {log}"):
                url = await _read_url(process, log, begin)
        except TimeoutError:
            raise EngineError(f"the server `{shown}` did not serve within {wait_s:g} s (wait_s): see {log}") from None
        if url is None:
            raise EngineError(f"the server `{shown}` ended before it served: {log} says why")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _read_url(process: asyncio.subprocess.Process, log: Path, begin: int) -> str | None:
    """Wait for the URL in what is written to the log from `begin` on; None if the process ends before."""
    with log.open("rb") as written:
        written.seek(begin)
        line = b""
        while True:
            has_ended = process.returncode is not None
            new = line + await asyncio.to_thread(written.read)
            if (found := _SERVES.search(new)) is not None:
                return found[1].decode()
            if has_ended:
                return None
            line = new[new.rfind(b"\n") + 1 :]
            await asyncio.sleep(_POLL_S)
