"""Keeps why a process of vLLM failed to start: its own exception says "see root cause above", of a log.

The processes log their exceptions, so their logging gets a second handler, which writes them into a file for the
process that waits. They import this module as they begin, whatever they are: so nothing heavy is imported here.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

_MAX_CHARACTERS = 2000
"""Of a message; those of torch about memory are long."""


class CauseHandler(logging.Handler):
    """Writes a line for each exception that is logged as an error; several processes may write into one file."""

    def __init__(self, path: str) -> None:
        """With the file's path; its folder may go before the process ends."""
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the exception of a record, if it has one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        line = json.dumps([record.getMessage(), f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]])
        with suppress(OSError), self._path.open("a") as file:  # the engine is up, and nobody waits for a cause
            file.write(line + "\n")


def read_cause(path: Path) -> str | None:
    """The exception of the first process that failed to start, on one line; None if none has.

    A worker fails before the process that waits for it, whose exception only says so. Of other exceptions that are
    logged, vLLM goes on: it tries another way, or raises what the caller gets.
    """
    with suppress(OSError):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return next((" ".join(error.split()) for message, error in lines if "failed to start" in message), None)
    return None
