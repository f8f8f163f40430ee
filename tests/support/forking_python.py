"""`python` for a launcher: what it would start anew, which imports torch for 4 seconds, is a fork of the test's server.

The launcher finds it in `PYTHON_EXEC`, and what it starts has the launcher's variables and exit code either way.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from support.forks import fork_server, run_python, server_address, share_server

_ADDRESS = "FORK_SERVER_OF_TESTS"


def forking_python(folder: Path) -> Mapping[str, str]:
    """Write the program into `folder`; the variables with which torchrun and accelerate start it."""
    fork_server()
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m support.forking_python "$@"\n')
    program.chmod(0o755)
    return {"PYTHON_EXEC": str(program), _ADDRESS: server_address()}


def main() -> None:
    """Run `-u -m MODULE arguments` in a fork and end as it does."""
    unbuffered, is_module, module, *arguments = sys.argv[1:]
    assert (unbuffered, is_module) == ("-u", "-m"), sys.argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a launcher ends the others when one failed
    share_server(os.environ.pop(_ADDRESS))
    ended = run_python(module, *arguments, timeout=240)
    sys.stdout.write(ended.stdout)
    sys.stderr.write(ended.stderr)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
