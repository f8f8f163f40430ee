"""Call a function in forked processes, which have everything imported and may be killed at any time.

They are forked from a separate process without threads, where forking is safe.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from types import TracebackType
from typing import Any

LONGEST_S = 60.0


class ForkedCalls:
    """A process that has imported a module, and calls the module's function `run` in a fork of itself."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forks", module],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkedCalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, found: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=LONGEST_S)

    def run(self, *, limit_s: float = LONGEST_S, **arguments: Any) -> int:
        """Call `run(**arguments)` and kill it after `limit_s`; its exit code, or minus the signal that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"limit_s": limit_s, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    """Answer each line of the standard input with the exit code of its call."""
    module = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        call = json.loads(line)
        child = os.fork()
        if child == 0:
            _call(module.run, call["arguments"])
        print(_exit_code(child, call["limit_s"]), flush=True)


def _call(function: Any, arguments: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    os.dup2(2, 1)  # the standard output is for exit codes
    try:
        function(**arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _exit_code(child: int, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
