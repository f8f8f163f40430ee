"""What this process has open."""

from __future__ import annotations

from pathlib import Path


def count_open_files() -> int:
    """Count files, pipes and sockets."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
