"""A server that is started and ended with a run."""

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
"""How long a server may take to end; then it is killed."""
_POLL_S = 0.1
_SERVES = re.compile(rb"serves .* at (http://\S+)\s")


@asynccontextmanager
async def started(command: Sequence[str], log: Path) -> AsyncIterator[str]:
    """The URL of the server that `command` starts in a process of its own; it is ended behind the block.

    All that it prints goes to the end of `log`, where its URL is read too. It writes to no pipe: one that nobody reads
    fills up in a long run, and the server would wait there.

    Raises:
        EngineError: it ends before it serves.
    """
    with log.open("ab") as output:
        begin = output.tell()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the trainer, which ends the server
        )
    try:
        while True:
            has_ended = process.returncode is not None
            found = _SERVES.search(await asyncio.to_thread(log.read_bytes), begin)
            if found is not None:
                break
            if has_ended:
                raise EngineError(f"the server must start, and `{' '.join(command)}` ended: {log} says why")
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
