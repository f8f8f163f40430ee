"""Group commit: whoever waits is written in one transaction, and a bad commit fails alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.sessions import make_commit, make_session
from support.waits import wait_until
from unbroken.errors import SessionEndedError, StoreError
from unbroken.ledger.records import SessionStatus, TurnCommit
from unbroken.ledger.store import SessionWriter, open_store
from unbroken.ledger.store.sql import SqlSessionStore


class SlowStore(SqlSessionStore):
    """A store whose transactions wait until they are let go, and that remembers their sizes."""

    def __init__(self, store: SqlSessionStore) -> None:
        super().__init__(store._database)
        self.sizes: list[int] = []
        self.may_write = threading.Semaphore(0)

    def commit(self, commits: Sequence[TurnCommit]) -> None:
        self.sizes.append(len(commits))
        assert self.may_write.acquire(timeout=60)
        super().commit(commits)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    store = SlowStore(open_store(str(tmp_path)))
    for name in "abcd":
        store.create(make_session(name))
    yield store
    store.close()


def count_turns(store: SlowStore, name: str) -> int:
    loaded = store.load(name)
    assert loaded is not None
    return len(loaded.turns)


async def start(writer: SessionWriter, *commits: TurnCommit) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(writer.commit(commit)) for commit in commits]
    await asyncio.sleep(0)
    return tasks


async def test_commits_that_wait_for_the_same_transaction_are_written_together(store):
    writer = SessionWriter(store)
    (first,) = await start(writer, make_commit("a", 0))
    await wait_until(lambda: store.sizes == [1])
    others = await start(writer, make_commit("b", 0), make_commit("c", 0), make_commit("a", 1))
    store.may_write.release(2)
    await asyncio.gather(first, *others)
    assert store.sizes == [1, 3]
    assert [count_turns(store, name) for name in "abc"] == [2, 1, 1]
    await writer.close()


async def test_a_bad_commit_fails_alone_and_in_order(store):
    store.finish("b", SessionStatus.FINISHED)
    store.may_write.release(100)
    writer = SessionWriter(store)
    unserialisable = TurnCommit(session_id="c", tools={"t": (object(),)})  # type: ignore[arg-type]
    tasks = await start(
        writer, *(make_commit("a", 0), make_commit("b", 0), make_commit("c", 0), unserialisable, make_commit("a", 1))
    )
    good, ended, other, broken, after = await asyncio.gather(*tasks, return_exceptions=True)
    assert good is other is after is None
    assert isinstance(ended, SessionEndedError)
    assert isinstance(broken, TypeError)
    assert [count_turns(store, name) for name in "abc"] == [2, 0, 1]
    await writer.commit(make_commit("c", 1))
    await writer.close()


async def test_a_cancelled_caller_s_turn_is_written_all_the_same(store):
    writer = SessionWriter(store)
    (task,) = await start(writer, make_commit("a", 0))
    await wait_until(lambda: store.sizes == [1])
    task.cancel()
    store.may_write.release(2)
    await writer.commit(make_commit("b", 0))
    assert task.cancelled()
    assert count_turns(store, "a") == 1
    await writer.close()


async def test_no_more_than_the_limit_wait_in_the_queue(store):
    writer = SessionWriter(store, max_waiting=2)
    tasks = await start(writer, *(make_commit(name, 0) for name in "abcd"))
    await wait_until(lambda: store.sizes != [])
    tasks[3].cancel()  # it has no place in the queue yet, so it is never written
    store.may_write.release(10)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert max(store.sizes) <= 2
    assert [count_turns(store, name) for name in "abcd"] == [1, 1, 1, 0]
    await writer.close()


async def test_closing_writes_what_waits_and_takes_no_more(store):
    writer = SessionWriter(store)
    tasks = await start(writer, make_commit("a", 0), make_commit("b", 0))
    closing = asyncio.create_task(writer.close())
    store.may_write.release(10)
    await asyncio.gather(*tasks, closing)
    assert [count_turns(store, name) for name in "ab"] == [1, 1]
    with pytest.raises(StoreError, match="writer of the sessions is closed"):
        await writer.commit(make_commit("a", 1))
    await writer.close()


def test_a_loop_that_ended_first_does_no_harm(tmp_path):
    """The thread outlives a loop that was stopped in mid-commit, and writes nevertheless."""
    slow = SlowStore(open_store(str(tmp_path)))
    slow.create(make_session("a"))

    async def leave() -> SessionWriter:
        writer = SessionWriter(slow)
        await start(writer, make_commit("a", 0))
        return writer

    writer = asyncio.run(leave())
    slow.may_write.release()
    asyncio.run(writer.close())
    slow.close()
    store = open_store(str(tmp_path))
    loaded = store.load("a")
    assert loaded is not None
    assert len(loaded.turns) == 1
    store.close()
