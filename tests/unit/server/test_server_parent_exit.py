"""A server that was started for one process notices when that one is gone, however it went."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from support.waits import wait_until

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


def test_a_child_whose_parent_is_killed_notices_it(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    asyncio.run(wait_until((tmp_path / "started").exists))
    time.sleep(0.2)
    assert not (tmp_path / "ended").exists()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    asyncio.run(wait_until((tmp_path / "ended").exists))
