"""Sessions in PostgreSQL: several gateways, connections that are lost, and servers that are started again."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from support.killed_store import kill_and_check
from support.postgres import LosingProxy, PostgresServer
from support.sessions import make_commit, make_session
from unbroken.errors import InvalidInputError, NotOwnerError, SessionEndedError, StoreError
from unbroken.ledger.records import SessionStatus, TurnCommit
from unbroken.ledger.store import SessionStore, open_store


@pytest.fixture
def server(postgres: PostgresServer) -> PostgresServer:
    """A server without sessions."""
    postgres.remove_sessions()
    return postgres


@pytest.fixture
def connect(server: PostgresServer) -> Iterator[Callable[..., SessionStore]]:
    """Opens one more store, as one more gateway does."""
    stores: list[SessionStore] = []

    def connect(url: str = server.url) -> SessionStore:
        stores.append(open_store(url))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def count_turns(store: SessionStore, name: str) -> int:
    loaded = store.load(name)
    assert loaded is not None
    return len(loaded.turns)


def test_a_session_is_taken_over_only_when_its_owner_is_gone(connect):
    first, second, third = connect(), connect(), connect()
    for name in ("s", "t", "released"):
        first.create(make_session(name))
    first.commit([make_commit("s", 0)])
    assert [second.acquire(name) for name in ("s", "t")] == [False, False]
    with pytest.raises(NotOwnerError):
        second.commit([make_commit("s", 1)])
    first.release("released")
    assert second.acquire("released") is True
    assert third.acquire("released") is first.acquire("released") is False
    first.close()
    assert second.acquire("s") is True
    assert third.acquire("s") is False
    second.commit([make_commit("s", 1)])
    assert third.acquire("t") is True
    assert count_turns(third, "s") == 2


def test_a_gateway_that_was_cut_off_goes_on_where_nobody_took_over(connect, server):
    first, second = connect(), connect()
    for name in ("kept", "lost"):
        first.create(make_session(name))
    server.cut_connections(first)
    assert second.acquire("lost") is True
    second.commit([make_commit("lost", 0)])
    first.commit([make_commit("kept", 0)])
    with pytest.raises(NotOwnerError):
        first.commit([make_commit("kept", 1), make_commit("lost", 0)])
    assert first.acquire("lost") is second.acquire("kept") is False
    assert [count_turns(first, name) for name in ("kept", "lost")] == [1, 1]


def test_any_gateway_may_finish_a_session_and_its_owner_is_told(connect):
    owner, other = connect(), connect()
    owner.create(make_session("s"))
    other.finish("s", SessionStatus.FINISHED, {"reward": 1.0})
    with pytest.raises(SessionEndedError, match="finished"):
        owner.commit([make_commit("s", 0)])


def test_gateways_that_store_and_delete_the_same_images_do_not_disturb_each_other(connect):
    """Each has its own connections, so their transactions overlap and lock the images in different orders."""
    files = [f"image {k}".encode() for k in range(6)]
    images = {hashlib.sha256(data).hexdigest(): data for data in files}

    def work(number: int) -> None:
        store = connect()
        for k in range(15):
            name = f"{number}-{k}"
            store.create(make_session(name))
            order = images if (number + k) % 2 else dict(reversed(images.items()))
            commits = [TurnCommit(session_id=name, images={sha256: data}) for sha256, data in order.items()]
            store.commit(commits)
            assert all(store.load_image(sha256) == data for sha256, data in images.items())
            assert store.delete(name)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert connect().load_image(next(iter(images))) is None


def test_no_turn_is_stored_after_another_gateway_finished_its_session(connect):
    """The end falls between any two statements of a commit."""
    owner, other = connect(), connect()
    ended: list[str] = []

    def commit_turns(name: str) -> None:
        with contextlib.suppress(SessionEndedError):
            for number in itertools.count():
                owner.commit([make_commit(name, number)])
        ended.append(name)

    for name in "abcdefghij":
        owner.create(make_session(name))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(commit_turns, name)
            while count_turns(other, name) < 2:
                pass
            other.finish(name, SessionStatus.FINISHED)
            num_turns = count_turns(other, name)
        assert ended[-1] == name
        assert count_turns(other, name) == num_turns


def test_a_server_that_is_started_again_is_waited_for(connect, server):
    store = connect()
    store.create(make_session("s"))
    server.stop()
    server.start()
    assert count_turns(store, "s") == 0
    store.commit([make_commit("s", 0)])
    assert count_turns(store, "s") == 1


@pytest.mark.parametrize("loses", ["loses_request", "loses_answer"])
def test_a_turn_whose_commit_lost_its_connection_is_stored_once(connect, server, loses):
    with tempfile.TemporaryDirectory() as folder:
        proxy = LosingProxy(server, Path(folder))
        store = connect(proxy.url)
        store.create(make_session("s"))
        setattr(proxy, loses, True)
        store.commit([make_commit("s", 0)])
        assert getattr(proxy, loses) is False
        assert count_turns(store, "s") == 1
        setattr(proxy, loses, True)
        assert store.acquire("s") is True
        store.finish("s", SessionStatus.FINISHED)
        store.close()
        proxy.close()


def test_nothing_that_was_acknowledged_is_lost_by_kill_9_and_the_next_gateway_takes_over(server):
    assert kill_and_check(server.url, num_kills=5) > 5


def test_gateways_that_start_at_the_same_time_make_the_tables_once(connect):
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: connect(), range(4)))
    for k, store in enumerate(stores):
        store.create(make_session(f"session-{k}"))
    assert len(stores[0].list_sessions()) == 4


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("postgresql://tester:se/cret@localhost/x", InvalidInputError, "cannot be parsed: write special characters"),
        ("postgresql://tester:se@cret@localhost/x", InvalidInputError, "cannot be parsed"),
        ("postgresql://tester@localhost/x?se@cret", InvalidInputError, "cannot be parsed"),
        ("postgres://tester:secret@127.0.0.1:1/x", StoreError, r"database 'x' on 127.0.0.1:1 cannot.*refused"),
        ("postgresql://tester:secret@/nothing?host={folder}", StoreError, '"nothing" does not exist'),
        ("postgresql://nobody:secret@/postgres?host={folder}", StoreError, 'role "nobody" does not exist'),
        (
            "postgresql://tester:secret@/plain?host={folder}",
            StoreError,
            "encoding UTF8, and the Po.*'plain'.* SQL_ASCII",
        ),
    ],
)
def test_an_error_names_the_database_and_never_the_password(server, url, error, text):
    if "plain" in url:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE plain ENCODING SQL_ASCII TEMPLATE template0")
    with pytest.raises(error, match=text) as caught:
        open_store(url.format(folder=os.path.dirname(server.socket_path)))  # noqa: PTH120
    assert "cret" not in str(caught.value)
    assert "cret" not in repr(caught.value.__cause__)


def test_without_psycopg_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "unbroken.ledger.store.postgres", raising=False)
    with pytest.raises(InvalidInputError, match=r"needs psycopg: pip install 'unbroken\[postgres\]'"):
        open_store("postgresql://localhost/x")
