"""End a process whose threads or environments do not end. It imports little: commands load it at their start."""

from __future__ import annotations

import os
import threading


def exit_in(seconds: float, *, status: int) -> None:
    """End this process after some time, with this exit status, if it has not ended by then."""
    exit_now = threading.Timer(seconds, os._exit, args=(status,))
    exit_now.daemon = True
    exit_now.start()
