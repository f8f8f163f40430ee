"""Servers in a process of their own: a script that takes a port."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.processes import free_port

FOLDER = Path(__file__).parent


@contextmanager
def serve_openenv(
    kind: str, python: Sequence[str] = (sys.executable,), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a server of OpenEnv, of the kind `text` or `tools`, and end it."""
    with serve_script([*python, str(FOLDER / "openenv_server.py")], kind, environment=environment) as url:
        yield url


@contextmanager
def serve_script(command: Sequence[str], *words: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start `command PORT WORDS...`, and end it; yields its URL."""
    port = free_port()
    with subprocess.Popen([*command, str(port), *words], env=environment) as process:
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
