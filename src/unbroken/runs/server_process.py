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

_STOP_S = 90.0
"""How long a server may take to end before it is killed."""
_POLL_S = 0.1
_SERVES = re.compile(rb"serves .* at (http://\S+)\s")


@asynccontextmanager
async def start_server(command: Sequence[str], log: Path) -> AsyncIterator[str]:
    """Run `command` in its own process during the block; yields the URL that it serves.

    The URL is read from `log`, which gets the server's output: a pipe that nothing reads would fill up and block it.

    Raises:
        EngineError: the server ends before it serves.
    """
    with log.open("ab") as output:
        begin = output.tell()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the server
        )
    try:
        while True:
            has_ended = process.returncode is not None
            found = _SERVES.search(await asyncio.to_thread(log.read_bytes), begin)
            if found is not None:
                break
            if has_ended:
                raise EngineError(f"the server `{' '.join(command)}` ended before it served: {log} says why")
            await asyncio.sleep(_POLL_S)
        yield found[1].decode()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
