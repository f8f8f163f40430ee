"""What this process has open."""

from __future__ import annotations

from pathlib import Path


def find_open_files() -> set[tuple[str, str]]:
    """Files, pipes and sockets: their numbers and what they are. Others may be closed meanwhile, by a collection."""
    return {(link.name, str(link.readlink())) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
