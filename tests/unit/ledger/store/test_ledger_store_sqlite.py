"""Sessions in a folder: one process, its versions, and what is left after kill -9."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from support.killed_store import kill_and_check
from support.sessions import make_commit, make_session
from unbroken.errors import InvalidInputError, StoreError
from unbroken.ledger.store import open_store, sqlite


def fill(folder: Path) -> None:
    store = open_store(str(folder))
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store.close()


def test_nothing_that_was_acknowledged_is_lost_by_kill_9_and_nothing_is_half_there(tmp_path):
    assert kill_and_check(str(tmp_path), num_kills=20) > 20


def test_a_turn_is_on_disk_before_commit_returns(tmp_path):
    store = open_store(str(tmp_path))
    connection = sqlite3.connect(tmp_path / "sessions.sqlite3")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    settings = []
    store._database.write(lambda cursor: settings.append(cursor.find("PRAGMA synchronous")))
    assert settings == [(2,)]  # FULL
    store.close()


def test_a_second_process_is_told_which_one_uses_the_folder(tmp_path):
    store = open_store(str(tmp_path))
    with pytest.raises(StoreError, match=f"process {os.getpid()} uses .*another folder, or use a postgresql"):
        open_store(str(tmp_path))
    store.close()
    open_store(str(tmp_path)).close()


def test_an_older_sqlite_is_refused_and_this_one_is_not(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.setattr(sqlite, "_OLDEST_SQLITE", (99, 1, 0))
    with pytest.raises(StoreError, match=r"sessions need SQLite 99\.1\.0 or later, and Python has "):
        open_store(str(tmp_path))


def test_an_empty_file_is_a_new_database_and_another_file_is_refused(tmp_path):
    (tmp_path / "sessions.sqlite3").touch()
    open_store(str(tmp_path)).close()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sessions.sqlite3").write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"sessions.sqlite3 cannot be used: .*not a database"):
            open_store(str(other))


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("", "store must be a folder or a postgresql:// URL, got ''"),
        ("mysql://user:secret@host/x", "got one that begins with mysql://"),
        ("{file}/below", "store must be a folder that can be written, got .*/file/below"),
        ("{file}", "store must be a folder that can be written"),
    ],
)
def test_a_location_that_is_no_store_is_refused_without_its_password(tmp_path, location, text):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=text) as caught:
        open_store(location.format(file=tmp_path / "file"))
    assert "secret" not in str(caught.value)


def test_the_files_are_readable_by_their_owner_only(tmp_path):
    fill(tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    store.create(make_session("t"))
    files = list((tmp_path / "store").iterdir())
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    store.close()


def test_a_full_disk_is_said_and_what_was_stored_stays(tmp_path):
    store = open_store(str(tmp_path))
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store._database.write(lambda cursor: cursor.execute("PRAGMA max_page_count = 40"))
    with pytest.raises(StoreError, match="full"):
        store.commit([make_commit("s", 1, text="x" * 200_000)])
    loaded = store.load("s")
    assert loaded is not None
    assert len(loaded.turns) == 1
    store.commit([make_commit("s", 1)])
    store.close()
