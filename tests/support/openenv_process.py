"""A server of openenv-core in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.packed_sender import free_port

FILE = str(Path(__file__).parent / "openenv_server.py")


@contextmanager
def serve_openenv(kind: str) -> Iterator[str]:
    """Start a server of the kind `text` or `tools`, and end it."""
    port = free_port()
    with subprocess.Popen([sys.executable, FILE, str(port), kind]) as process:
        try:
            _wait_until_up(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while True:
        assert process.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.2)
        else:
            return
