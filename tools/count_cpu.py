"""Run a command and write the CPU seconds that it and its descendants took into a file, for `measure_house.py`.

    python tools/count_cpu.py FILE COMMAND [WORD ...]

Processes whose parents have ended are counted too, where the system lets this process adopt them (Linux): the fork
servers of tests and all that they forked. A command that fails leaves the file as it was: half a suite says nothing.
Ends with the command's status.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_ADOPT = 36
"""`PR_SET_CHILD_SUBREAPER` of prctl(2)."""
_LEFT_S = 60.0
"""How long to wait for what the command has left: a fork server ends once nobody can ask it any more."""


def main() -> int:
    """Run the command and adopt what its processes leave; its status."""
    path, *command = sys.argv[1:]
    with suppress(AttributeError, OSError):  # other systems have no such function: orphans are not counted there
        ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    status = None
    while status is None:
        pid, found = os.wait()  # orphans too, at once: tests look whether a process has gone
        if pid == process.pid:
            status = process.returncode = os.waitstatus_to_exitcode(found)
    _wait_for_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status == 0:
        Path(path).write_text(f"{used.ru_utime + used.ru_stime:.0f}\n")
    return status


def _wait_for_orphans() -> None:
    until_s = time.monotonic() + _LEFT_S
    with suppress(ChildProcessError):  # there are none
        while time.monotonic() < until_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
