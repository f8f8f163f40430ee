"""The task that most tests attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.terminal_tasks import write_task


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "task")
