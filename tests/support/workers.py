"""Workers of a gateway that do as a test says: `Workers` starts `work` in processes of their own."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unbroken.gateway.config import GatewayConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What `Workers` needs of a gateway's options, and what the workers do by the order of their starts."""

    folder: Path
    """Each worker writes a file with its number, which has its process id, and another one when it may serve."""
    waits: tuple[int, ...] = ()
    """Workers that never serve."""
    fails: tuple[int, ...] = ()
    """Workers that end with status 3."""
    workers: int = 3
    drain_s: int = 1
    exit_with_parent: bool = False
    gateway: GatewayConfig = field(default_factory=GatewayConfig)


def work(options: WorkerOptions, shared: Any, ready: Connection, gate: Connection) -> None:
    """Serve, wait or fail."""
    number = _take_number(options.folder)
    if number in options.fails:
        sys.exit(3)
    if number not in options.waits:
        ready.send(f"serving at worker {number} (ready)")
        ready.close()
        with suppress(EOFError):
            gate.recv()
        (options.folder / f"{number} serves").touch()
    time.sleep(600)


def _take_number(folder: Path) -> int:
    for number in range(100):
        try:
            with (folder / str(number)).open("x") as file:
                file.write(f"{os.getpid()}")
        except FileExistsError:
            continue
        return number
    raise AssertionError("too many workers")
