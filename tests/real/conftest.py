"""The real model and real conversations, which `tools/real_model.py` makes the first time; without a network, skips."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "real_model.py"
STATUS_UNAVAILABLE = 3


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of SmolLM2-135M-Instruct, in float32."""
    return make_folder()


@pytest.fixture(scope="session")
def conversations() -> Path:
    """The folder with the data of conversations with tools."""
    return make_folder("--conversations")


def make_folder(*options: str) -> Path:
    done = subprocess.run([sys.executable, str(TOOL), *options], text=True, capture_output=True)
    if done.returncode == STATUS_UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
