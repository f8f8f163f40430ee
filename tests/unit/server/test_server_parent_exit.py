"""A server that was started for one process notices when that one is gone, however it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import asyncio, os, sys
from pathlib import Path
from unbroken.server.process import wait_for_parent_exit
parent = os.getppid()
Path(sys.argv[1], "started").touch()
asyncio.run(wait_for_parent_exit(parent, every_s=0.05))
Path(sys.argv[1], "ended").touch()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, sys.argv[1]])"


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} never came"
        time.sleep(0.02)


def test_a_child_whose_parent_is_killed_notices_it(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    wait_for(tmp_path / "started")
    time.sleep(0.2)
    assert not (tmp_path / "ended").exists()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(tmp_path / "ended")
