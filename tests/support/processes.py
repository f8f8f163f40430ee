"""Python processes that train together over gloo, started by a test."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.forks import ForkedPython


def run_two(module: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Run `python -m module arguments` as ranks 0 and 1 of a world of two on the CPU, and check that both succeed."""
    run_processes(module, *arguments, environment=environment, codes=[0, 0])


def run_processes(
    module: str, *arguments: str | Path, environment: Mapping[str, str] | None = None, codes: Sequence[int]
) -> list[str]:
    """As `run_two`, a process for each of the exit codes that they must have; returns what each has written."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    shared |= {"WORLD_SIZE": str(len(codes)), "GLOO_SOCKET_IFNAME": "lo"}  # a host's name need not resolve
    shared |= environment or {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(len(codes))]
        processes = [
            ForkedPython(
                module, *arguments, output=output, environment=shared | {"RANK": output.name, "LOCAL_RANK": output.name}
            )
            for output in outputs
        ]
        try:
            found = [process.wait(timeout=480) for process in processes]
        finally:
            for process in processes:
                process.kill()
        texts = [output.read_text() for output in outputs]
        assert found == list(codes), "\n".join(texts)
        return texts


def free_port() -> int:
    """Return a port that is free now, and below those that the system gives to others meanwhile (Linux: 32768)."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", port := 15_000 + secrets.randbelow(17_000))):
            return port
