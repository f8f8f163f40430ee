"""Exceptions of user code: of tools, environments and rewards."""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from pathlib import Path

from unbroken.errors import RolloutError, UnbrokenError

_OURS = str(Path(__file__).parents[1])
_INTEGRATIONS = str(Path(__file__).parents[1] / "integrations")
_CYTHON = (".pyx", ".pxi", ".pxd")
"""Endings of lines that pyarrow's compiled code names, by paths of the machine that built it."""
_LIBRARIES = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_path("purelib"))


def must_propagate(error: BaseException) -> bool:
    """Whether an exception must be raised again: a cancellation of the current task, its closing, the user's interrupt.

    A `CancelledError` is not enough: user code that cancels a task that it made and awaits it also raises one.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, (KeyboardInterrupt, GeneratorExit))


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


def format_error(error: BaseException, *, first_line: bool = False) -> str:
    """Format an exception as `ValueError: no such row`, in text that can be encoded, even if its `str` fails.

    With `first_line`, nothing else of a text that continues, as with a traceback of Ray or an answer of the hub.
    """
    try:
        message = str(error).strip().partition("\n")[0] if first_line else str(error)
    except Exception as unreadable:
        message = f"(its message cannot be read: {type(unreadable).__name__})"
    # Half a surrogate pair is escaped, because no tokenizer can encode it; all other text stays as it is.
    return f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()


def format_frames(error: BaseException, *, raised_there: bool = False) -> str:
    """The lines of user code in the traceback of an exception or a cause of it, as Python prints them, or "".

    Of several stretches of user code the last one is meant, such as the reward that an environment of ours calls for
    one of the user's. With `raised_there`, nothing if the exception came from our own code below.

    Lines of `unbroken.integrations` count too, unless the exception is one of ours, whose text says what is wrong: they
    call what others wrote, and of an exception from there nothing else would have a line.
    """
    seen: BaseException | None = error
    is_named = False
    while seen is not None:
        is_named = is_named or isinstance(seen, UnbrokenError)
        frames, is_ours = _find_frames(seen, with_integrations=not is_named)
        if frames and not (raised_there and is_ours):
            return "\n" + "".join(traceback.format_list(frames)).rstrip()
        from_elsewhere: str = getattr(seen, "user_frames", "")
        if from_elsewhere:
            return from_elsewhere
        seen, raised_there = seen.__cause__, False
    return ""


def _find_frames(error: BaseException, *, with_integrations: bool) -> tuple[list[traceback.FrameSummary], bool]:
    """The last stretch of user code in a traceback, and whether code of ours comes after it."""
    frames: list[traceback.FrameSummary] = []
    is_ours = False
    for frame in traceback.extract_tb(error.__traceback__):
        is_user = with_integrations and frame.filename.startswith(_INTEGRATIONS)
        if frame.filename.startswith(_OURS) and not is_user:
            is_ours = True
        elif not frame.filename.startswith(_LIBRARIES) and not frame.filename.endswith(_CYTHON):
            frames, is_ours = [*([] if is_ours else frames), frame], False
    return frames, is_ours
