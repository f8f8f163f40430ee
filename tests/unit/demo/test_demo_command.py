"""SIGTERM ends the demo as it ends a run: its folder is free, and the status is the one that shells give it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

DEMO = """
import sys
from unbroken.cli import main
from unbroken.runs import signals

signals._THREADS_S = 0.5
sys.exit(main(["demo", "--output", sys.argv[1]]))
"""


def test_sigterm_ends_the_demo_while_it_warms_its_model_up(tmp_path: Path) -> None:
    lock = tmp_path / "demo" / "run.lock"
    with subprocess.Popen([sys.executable, "-c", DEMO, str(lock.parent)]) as process:
        try:
            while not lock.exists():
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()
    assert not lock.exists()
