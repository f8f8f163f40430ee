"""Strangers' code, the tools, the environment and the reward, fails in any way it likes: what of it is a failure."""

from __future__ import annotations

import asyncio


def must_propagate(error: BaseException) -> bool:
    """Whether an exception concerns whoever runs this task, and must pass: all others are a failure of what it called.

    These are a cancellation of the current task, the end of its coroutine, and the user's interrupt. A `CancelledError`
    alone proves nothing: code that cancels a task of its own and awaits it raises one while nobody cancelled it.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, (KeyboardInterrupt, GeneratorExit))


def unwrap_group(error: BaseException) -> BaseException:
    """The error itself; where a task group raised it as the only one of a group, the one inside."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def format_error(error: BaseException) -> str:
    """`ValueError: no such row`, for any exception: as text that can be encoded, also if it cannot say what it is."""
    try:
        message = str(error)
    except Exception as unreadable:
        message = f"(its message cannot be read: {type(unreadable).__name__})"
    # Half a surrogate pair, which no tokenizer can encode, is spelled out; all other text stays as it is.
    return f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()
