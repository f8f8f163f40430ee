"""Exceptions of user code: of tools, environments and rewards."""

from __future__ import annotations

import asyncio

from unbroken.errors import RolloutError


def must_propagate(error: BaseException) -> bool:
    """Whether an exception must be raised again: a cancellation of the current task, its closing, the user's interrupt.

    A `CancelledError` is not enough: user code that cancels a task of its own and awaits it also raises one.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, (KeyboardInterrupt, GeneratorExit))


def is_connection_failure(error: BaseException) -> bool:
    """Whether an exception, or a cause of it, says that a connection failed or took too long: a later try may succeed.

    Clients of HTTP raise exceptions of their own from such a cause. An `OSError` of a file is not meant: it has a name.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.filename is None:  # ConnectionError and TimeoutError are kinds of it
            return True
        seen = seen.__cause__
    return False


def unwrap_group(error: BaseException) -> BaseException:
    """Return the only exception of a group, as a task group raises it; any other error is returned as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def to_exception(error: BaseException) -> Exception:
    """Return an error that may end a run: a `RolloutError` in the place of what is no `Exception`."""
    if isinstance(error, Exception):
        return error
    message = f"rollouts ended with {format_error(error)}"
    if isinstance(error, asyncio.CancelledError):
        message = "rollouts were cancelled, and not by the run: an environment or a tool cancels its own task"
    ended = RolloutError(message)
    ended.__cause__ = error
    return ended


def format_error(error: BaseException) -> str:
    """Format an exception as `ValueError: no such row`, in text that can be encoded, even if its `str` fails."""
    try:
        message = str(error)
    except Exception as unreadable:
        message = f"(its message cannot be read: {type(unreadable).__name__})"
    # Half a surrogate pair is escaped, because no tokenizer can encode it; all other text stays as it is.
    return f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()
