"""Run a command and write the CPU seconds that it and its children took into a file, for `measure_house.py`.

    python tools/count_cpu.py FILE COMMAND [WORD ...]

A command that fails leaves the file as it was: half a suite says nothing. Ends with the command's status.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the command; its status."""
    path, *command = sys.argv[1:]
    status = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status == 0:
        Path(path).write_text(f"{used.ru_utime + used.ru_stime:.0f}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
