"""Stores that are read while a gateway writes them, after it ended, and after it was killed; nothing is changed."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.postgres import run_postgres
from support.sessions import make_commit, make_session, to_plain
from unbroken.errors import InvalidInputError, StoreError
from unbroken.ledger.records import SessionStatus
from unbroken.ledger.store import open_store, open_store_reader, sqlite

WRITER = """
import os, signal, sys
from support.sessions import make_commit, make_session
from unbroken.ledger.store import open_store
store = open_store(sys.argv[1])
store.create(make_session("s"))
for number, line in enumerate(sys.stdin):
    if line == "kill\\n":
        os.kill(os.getpid(), signal.SIGKILL)
    store.commit([make_commit("s", number, num_ids=2000)])
    print(number, flush=True)
store.close()
"""


class Writer:
    """A process that commits turns to session `s`."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def commit(self) -> None:
        self.tell("commit")
        assert self._process.stdout is not None
        assert self._process.stdout.readline()

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path)
    writer.commit()
    yield writer
    with contextlib.suppress(ValueError):
        writer.end()


def read_files(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Time of change, inode and content of all files. The writer must be another process: to close a file of a SQLite
    database in its process would take its locks from it."""
    found = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    assert "sessions.sqlite3" in found
    return found


def count_turns(folder: Path) -> int:
    loaded = open_store_reader(str(folder)).load("s")
    assert loaded is not None
    return len(loaded.turns)


def test_turns_are_read_at_once_while_they_are_written_and_no_file_changes(tmp_path, writer):
    for number in range(2, 5):
        writer.commit()
        before = read_files(tmp_path)
        assert count_turns(tmp_path) == number
        reader = open_store_reader(str(tmp_path))
        assert reader.find_state() == "running"
        (listed,) = reader.list_sessions(1, 100)
        assert (listed.number, listed.session_id, listed.num_turns) == (1, "s", number)
        assert read_files(tmp_path) == before
        assert before.keys() >= {"sessions.sqlite3-wal", "sessions.sqlite3-shm"}


def test_a_store_whose_gateway_ended_is_read_and_no_file_changes(tmp_path, writer):
    reader = open_store_reader(str(tmp_path))
    while_written = reader.find_revision()
    writer.end()
    before = read_files(tmp_path)
    assert before.keys() == {"sessions.sqlite3", "lock"}
    assert count_turns(tmp_path) == 1
    assert reader.find_state() == "ended"
    assert reader.find_revision() != while_written
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("has_index", [True, False], ids=["as it was left", "copied without the log's index"])
def test_a_store_whose_gateway_was_killed_has_all_turns_and_no_file_changes(tmp_path, writer, has_index):
    writer.commit()
    writer.tell("kill")
    writer._process.wait()
    if not has_index:
        (tmp_path / "sessions.sqlite3-shm").unlink()
    before = read_files(tmp_path)
    assert before["sessions.sqlite3-wal"][2]
    assert count_turns(tmp_path) == 2
    assert open_store_reader(str(tmp_path)).find_state() == "died"
    assert read_files(tmp_path) == before


def test_a_store_that_is_only_readable_is_read(tmp_path):
    fill(tmp_path)
    tmp_path.chmod(0o500)
    (tmp_path / "sessions.sqlite3").chmod(0o400)
    assert count_turns(tmp_path) == 1
    tmp_path.chmod(0o700)


def test_gateways_that_begin_and_end_and_write_are_never_in_the_way_of_a_reader(tmp_path):
    fill(tmp_path)
    script = (
        "import sys\nfrom support.sessions import make_commit\nfrom unbroken.ledger.store import open_store\n"
        "for number in range(1, 30):\n"
        "    store = open_store(sys.argv[1]); store.acquire('s')\n"
        "    store.commit([make_commit('s', number)]); store.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    seen = [1]
    while process.poll() is None:
        seen.append(count_turns(tmp_path))
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert count_turns(tmp_path) == 30


def test_what_is_read_is_what_the_store_holds(tmp_path):
    fill(tmp_path)
    store = open_store(str(tmp_path))
    store.create(make_session("other"))
    store.finish("s", SessionStatus.FINISHED, {"reward": 0.5})
    reader = open_store_reader(str(tmp_path))
    assert reader.list_numbers() == [(1, "finished"), (2, "open")]
    assert to_plain(reader.load("s")) == to_plain(store.load("s"))
    assert reader.load("missing") is None
    assert reader.load_image("0" * 64) is None
    assert reader.load_image("no digest") is None
    store.close()


def test_a_folder_without_a_store_or_with_another_version_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"store must be a folder with sessions\.sqlite3"):
        open_store_reader(str(tmp_path))
    fill(tmp_path)
    for version, text in ((99, "use the release that wrote them"), (0, "a gateway of this release brings them up")):
        with contextlib.closing(sqlite3.connect(tmp_path / "sessions.sqlite3")) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(StoreError, match=text):
            open_store_reader(str(tmp_path)).list_numbers()


def test_a_database_of_several_gateways_is_read_in_transactions_that_are_read_only():
    with run_postgres() as server:
        with pytest.raises(StoreError, match="has no store"):
            open_store_reader(server.url)
        store = open_store(server.url)
        reader = open_store_reader(server.url)
        revision = reader.find_revision()
        store.create(make_session("s"))
        store.commit([make_commit("s", 0)])
        assert reader.find_revision() != revision
        assert to_plain(reader.load("s")) == to_plain(store.load("s"))
        (listed,) = reader.list_sessions(1, 10)
        assert listed.num_turns == 1
        assert reader.find_state() == "running"
        store.close()
        end = time.monotonic() + 60
        while reader.find_state() != "ended":
            assert time.monotonic() < end


def fill(folder: Path) -> None:
    store = open_store(str(folder))
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store.close()


@pytest.mark.parametrize("num_changes", [3, 1000])
def test_a_store_that_changes_while_it_is_read_is_read_once_it_stops_or_is_an_error(tmp_path, monkeypatch, num_changes):
    """As a copy that is still being made does."""
    store = open_store(str(tmp_path))
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store.close()
    reader, sign, seen = open_store_reader(str(tmp_path)), sqlite._sign, []

    def sign_anew(path: Path) -> tuple[int, int]:
        seen.append(path)
        return min(len(seen), num_changes), sign(path)[1]

    monkeypatch.setattr(sqlite, "_PAUSE_S", 0.0)
    monkeypatch.setattr(sqlite, "_sign", sign_anew)
    if num_changes == 3:
        assert reader.load("s") is not None
    else:
        with pytest.raises(StoreError, match=r"sessions.sqlite3 cannot be read: it is written while it is read"):
            reader.load("s")
