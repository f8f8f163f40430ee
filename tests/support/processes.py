"""Two Python processes that train together over gloo, started by a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_two(module: str, *arguments: str | Path) -> None:
    """Run `python -m module arguments` as ranks 0 and 1 of a world of two on the CPU, and check that both succeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    shared["GLOO_SOCKET_IFNAME"] = "lo"  # a host whose name does not resolve must not matter
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
