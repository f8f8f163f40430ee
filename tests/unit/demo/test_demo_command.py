"""SIGTERM ends the demo as it ends a run: its folder is free, and the status is the one that shells give it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.forks import ForkedPython

pytestmark = pytest.mark.e2e

DEMO = """
import sys
from unbroken.cli import main
from unbroken.runs import signals

signals._THREADS_S = 0.5
sys.exit(main(["demo", "--output", sys.argv[1]]))
"""


def test_sigterm_ends_the_demo_while_it_warms_its_model_up(tmp_path: Path) -> None:
    lock, program = tmp_path / "demo" / "run.lock", tmp_path / "program.py"
    program.write_text(DEMO)
    process = ForkedPython(program, lock.parent, output=tmp_path / "output")
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
