"""A PostgreSQL server for tests: Debian's package, in a temporary folder, as a user that is not root."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

USERS = ("postgres", "nobody")


class PostgresServer:
    """A server that listens on a socket in its folder only."""

    def __init__(self, folder: Path) -> None:
        self._programs = _find_programs()
        self._folder = folder
        self._account: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = next(user for user in USERS if _has_user(user))
            self._account = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
            shutil.chown(folder, user)
        self._call("initdb", "--auth=trust", "--username=tester", "--no-sync", "--encoding=UTF8", "--locale=C")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://tester@/postgres?host={self._folder}"

    @property
    def socket_path(self) -> str:
        return str(self._folder / ".s.PGSQL.5432")

    def start(self) -> None:
        settings = ("listen_addresses=", "fsync=off", "deadlock_timeout=50", f"unix_socket_directories={self._folder}")
        options = [part for setting in settings for part in ("-c", setting)]
        with (self._folder / "log").open("ab") as log:
            command = [self._programs / "postgres", "-D", self._folder / "data", *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, **self._account)
        for _ in range(1200):
            ready = [self._programs / "pg_isready", "-q", "-h", self._folder]
            if subprocess.run(ready, check=False).returncode == 0:
                return
            time.sleep(0.05)
        raise RuntimeError((self._folder / "log").read_text())

    def stop(self) -> None:
        """Stop at once, without a checkpoint."""
        if self._process is not None:
            self._process.send_signal(3)
            self._process.wait(60)
            self._process = None

    def remove_sessions(self) -> None:
        import psycopg

        with psycopg.connect(self.url) as connection:
            connection.execute("SET client_min_messages = warning")
            connection.execute("DROP SCHEMA IF EXISTS unbroken, unbroken_tinker CASCADE")

    def cut_connections(self, store: Any) -> None:
        """End the server's side of a store's connections."""
        import psycopg

        connections = (each._connection for each in (store._database._writer, store._database._reader))
        numbers = [connection.info.backend_pid for connection in connections if connection is not None]
        with psycopg.connect(self.url) as connection:
            for number in numbers:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", (number,))

    def _call(self, program: str, *arguments: str) -> None:
        command = [self._programs / program, "-D", self._folder / "data", *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder, **self._account)


class LosingProxy:
    """A socket in `folder` before the server's, which loses a connection in the middle of its next COMMIT, once."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.url = f"postgresql://tester@/postgres?host={folder}"
        self.loses_request = False
        """The COMMIT does not reach the server."""
        self.loses_answer = False
        """Its answer does not reach the client."""
        self._server = server
        self._socket = socket.create_server(str(folder / ".s.PGSQL.5432"), family=socket.AF_UNIX)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server.socket_path)
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client and b"COMMIT\0" in data and self._lose(server, data):
                        return
                    (server if source is client else client).sendall(data)

    def _lose(self, server: socket.socket, data: bytes) -> bool:
        if self.loses_answer:
            self.loses_answer = False
            server.sendall(data)
            assert b"COMMIT\0" in server.recv(65536)
            return True
        if self.loses_request:
            self.loses_request = False
            return True
        return False


@contextmanager
def run_postgres() -> Iterator[PostgresServer]:
    """Skips the test if PostgreSQL or psycopg is not installed."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install '.[postgres]'", exc_type=ImportError)
    if _find_programs() is None:
        pytest.skip("needs a PostgreSQL server: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        server = PostgresServer(folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with run_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where nothing is stored, in each database; the server is left without sessions."""
    if request.param == "sqlite":
        yield str(tmp_path / "store")
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    server.remove_sessions()
    yield server.url
    server.remove_sessions()


def _find_programs() -> Any:
    """The folder of the newest server; None if no folder exists."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if folders:
        return max(folders, key=lambda folder: int(folder.parent.name))
    initdb = shutil.which("initdb")
    return None if initdb is None else Path(initdb).parent


def _has_user(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
