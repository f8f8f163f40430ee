"""Two Python processes that train together over gloo, started by a test."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support.forks import ForkedPython


def run_two(module: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Run `python -m module arguments` as ranks 0 and 1 of a world of two on the CPU, and check that both succeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    shared["GLOO_SOCKET_IFNAME"] = "lo"  # a host whose name does not resolve must not matter
    shared |= environment or {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, rank) for rank in ("0", "1")]
        processes = [
            ForkedPython(
                module, *arguments, output=output, environment=shared | {"RANK": output.name, "LOCAL_RANK": output.name}
            )
            for output in outputs
        ]
        try:
            codes = [process.wait(timeout=480) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [0, 0], "\n".join(output.read_text() for output in outputs)
