"""How the process of a run began and ended, in `process.json` of its folder; one that is killed leaves how it began."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unbroken.rollout.failures import format_error
from unbroken.runs.signals import Terminated

PROCESS_FILE = "process.json"
_MAX_ERROR = 4000
_KERNEL_EVENTS, _BOOT = Path("/proc/vmstat"), Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def record_process(folder: Path) -> Iterator[None]:
    """Write into `folder` that this process runs, and at the end of the block how it ended.

        {"status": "running", "process": 4711, "host": "gpu-3", "boot": "9faca9af-...", "memory_kills": 1, "began": ...}
        {"status": "failed", "error": "all 8 rollouts of step 0 failed, ...", "process": 4711, ..., "ended": ...}

    Of several processes of a run, only the first calls this. A disk on which it cannot be written ends no run.
    """
    began = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "boot": read_boot(),
        "memory_kills": count_memory_kills(),
        "began": _now(),
    }
    _write(folder, {"status": "running", **began})
    status, said = "finished", ""
    try:
        yield
    except BaseException as error:
        status, said = _describe(error), format_error(error)[:_MAX_ERROR]
        raise
    finally:
        _write(folder, {"status": status, "error": said, **began, "ended": _now()})


def count_memory_kills() -> int | None:
    """How many processes the kernel has ended for memory since it started, anywhere; None if it does not say."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in _KERNEL_EVENTS.read_text("ascii").splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None


def read_boot() -> str | None:
    """Which start of the kernel this is: its counts begin anew with each."""
    with suppress(OSError, ValueError):
        return _BOOT.read_text("ascii").strip()
    return None


def _describe(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return "terminated"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _write(folder: Path, value: Mapping[str, Any]) -> None:
    part = folder / f".{PROCESS_FILE}.part"
    with suppress(OSError):
        # For this user only: an error may hold a prompt.
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write((json.dumps(value, indent=1) + "\n").encode("utf-8", "replace"))
        part.replace(folder / PROCESS_FILE)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
