"""What every store of sessions does, whatever keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from support.sessions import BROKEN, TOOLS, digest_key, make_commit, make_session, make_turn, open_later_store, to_plain
from unbroken.errors import InvariantError, NotOwnerError, SessionEndedError, StoreError, UnknownSessionError
from unbroken.ledger.records import MessageRecord, SessionStatus, TurnCommit
from unbroken.ledger.store import SessionStore, open_store
from unbroken.ledger.store.tables import MIGRATIONS

CAT, DOG = b"a cat's file", b"a dog's file"
CAT_SHA256, DOG_SHA256 = (hashlib.sha256(data).hexdigest() for data in (CAT, DOG))


@pytest.fixture
def reopen(location: str) -> Iterator[Callable[[], SessionStore]]:
    """Opens the store; the one before is closed."""
    stores: list[SessionStore] = []

    def open_again() -> SessionStore:
        for store in stores:
            store.close()
        stores.append(open_store(location))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()


@pytest.fixture
def store(reopen: Callable[[], SessionStore]) -> SessionStore:
    return reopen()


def show_image(node: int, sha256: str) -> MessageRecord:
    content = [{"type": "text", "text": "look"}, {"type": "image", "sha256": sha256}]
    return MessageRecord(node=node, parent=None, message={"role": "user", "content": content}, sampled=False)


def test_a_session_is_loaded_as_it_was_created(store, reopen):
    record = make_session("s", metadata={"task": "ä\0\ud800"}, sampling={"temperature": 1.0})
    store.create(record)
    for get in (lambda: store, reopen):
        loaded = get().load("s")
        assert loaded is not None
        assert loaded.record == record
        assert (loaded.messages, loaded.turns, loaded.tools, loaded.counters) == ((), (), {}, {})


def test_what_was_committed_is_loaded_unchanged_by_the_next_process(store, reopen):
    store.create(make_session("s"))
    first, second = make_commit("s", 0), make_commit("s", 1, num_ids=2)
    store.commit([first])
    store.commit([second])
    loaded = reopen().load("s")
    assert loaded is not None
    assert to_plain(loaded.messages) == to_plain(first.messages + second.messages)
    assert to_plain(loaded.turns) == to_plain(first.turns + second.turns)
    assert loaded.tools == {"tools": TOOLS}


def test_text_that_databases_refuse_is_kept(store):
    store.create(make_session("s"))
    message = {"role": "assistant", "content": "\0", "tool_calls": [{"function": {"arguments": {"x": "\ud800"}}}]}
    store.commit([TurnCommit(session_id="s", messages=(replace(show_image(0, ""), message=message),))])
    loaded = store.load("s")
    assert loaded is not None
    assert loaded.messages[0].message == message


def test_a_turn_with_several_choices_is_stored_in_their_order(store):
    store.create(make_session("s"))
    turns = (make_turn(0, choice=1), make_turn(0, choice=0))
    store.commit([TurnCommit(session_id="s", turns=turns)])
    loaded = store.load("s")
    assert loaded is not None
    assert to_plain(loaded.turns) == to_plain(turns[::-1])
    assert loaded.turns[1].given is None


def test_turns_of_many_sessions_are_one_commit(store, reopen):
    for name in "abc":
        store.create(make_session(name))
    commits = [make_commit(name, number) for number in range(3) for name in "abc"]
    store.commit(commits)
    store.commit([])
    again = reopen()
    for name in "abc":
        loaded = again.load(name)
        assert loaded is not None
        assert [turn.number for turn in loaded.turns] == [0, 1, 2]


def test_counters_are_the_sums_of_all_commits(store):
    store.create(make_session("s"))
    for counters in ({"forks/edited_reply": 2}, {"forks/edited_reply": 1, "bridges/derived": 5}, {"cuts/x": 0}):
        store.commit([TurnCommit(session_id="s", counters=counters)])
    loaded = store.load("s")
    assert loaded is not None
    assert loaded.counters == {"bridges/derived": 5, "forks/edited_reply": 3}


def test_tools_of_a_known_key_are_ignored(store):
    store.create(make_session("s"))
    store.commit([TurnCommit(session_id="s", tools={"t": TOOLS}), TurnCommit(session_id="s", tools={"t": ()})])
    store.commit([TurnCommit(session_id="s", tools={"none": ()})])
    loaded = store.load("s")
    assert loaded is not None
    assert loaded.tools == {"t": TOOLS, "none": ()}


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (make_commit("gone", 0), UnknownSessionError, "there is no session 'gone'"),
        (make_commit("ended", 0), SessionEndedError, "'ended' must be open, but is finished"),
        (make_commit("released", 0), NotOwnerError, "'released' must be owned"),
        (make_commit("s", 0), StoreError, "turns|messages"),
        (TurnCommit(session_id="s", turns=(make_turn(0),)), StoreError, "turns"),
        (TurnCommit(session_id="s", messages=(show_image(9, DOG_SHA256),)), StoreError, "never stored.*its bytes"),
        (TurnCommit(session_id="s", turns=(make_turn(9, image=DOG),)), StoreError, "never stored.*its bytes"),
        (TurnCommit(session_id="s", images={CAT_SHA256: DOG}), InvariantError, "named by its SHA-256"),
    ],
    ids=["deleted", "ended", "released", "repeated", "repeated turn", "image", "image of a turn", "wrong image"],
)
def test_if_one_commit_cannot_be_stored_none_is(store, bad, error, text):
    for name in ("s", "other", "ended", "released"):
        store.create(make_session(name))
    store.finish("ended", SessionStatus.FINISHED)
    store.release("released")
    store.commit([make_commit("s", 0)])
    with pytest.raises(error, match=text):
        store.commit([make_commit("other", 0), bad, make_commit("other", 1)])
    loaded = store.load("other")
    assert loaded is not None
    assert (loaded.turns, loaded.messages, loaded.tools) == ((), (), {})
    store.commit([make_commit("other", 0)])


@pytest.mark.parametrize("session", [make_session("s"), replace(make_session("t"), key_digest=digest_key("key of s"))])
def test_an_id_or_a_key_that_is_taken_is_refused(store, session):
    store.create(make_session("s"))
    with pytest.raises(StoreError, match="sessions"):
        store.create(session)


def test_a_session_is_found_by_its_key(store):
    store.create(make_session("s"))
    assert store.find_by_key(digest_key("key of s")) == "s"
    assert store.load_record("s") == make_session("s")
    assert store.find_by_key(digest_key("another")) is None


@pytest.mark.parametrize("session_id", ["", "x", "\0", "\ud800", "a\nb", "ä" * 5000])
def test_an_unknown_session_is_none_whatever_its_name(store, session_id):
    assert store.load(session_id) is store.load_record(session_id) is None
    assert store.delete(session_id) is False
    store.release(session_id)
    calls: list[Callable[[], Any]] = [
        lambda: store.acquire(session_id),
        lambda: store.finish(session_id, SessionStatus.FINISHED),
        lambda: store.commit([TurnCommit(session_id=session_id)]),
        lambda: store.list_sessions(after=session_id),
    ]
    for call in calls:
        with pytest.raises(UnknownSessionError):
            call()


def test_sessions_are_listed_as_they_were_created(store):
    for name in "cabd":
        store.create(make_session(name))
    store.finish("a", SessionStatus.FINISHED)

    def names(**options: Any) -> list[str]:
        return [record.session_id for record in store.list_sessions(**options)]

    assert names() == ["c", "a", "b", "d"]
    assert names(status=SessionStatus.OPEN) == ["c", "b", "d"]
    assert names(after="a") == ["b", "d"]
    assert names(after="c", status=SessionStatus.OPEN, limit=1) == ["b"]


def test_a_finished_session_keeps_its_turns_and_takes_no_more(store, reopen):
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store.finish("s", SessionStatus.FINISHED, {"reward": 0.5})
    store.finish("s", SessionStatus.FINISHED, {"reward": 0.5})  # its answer was lost, and it was sent again
    with pytest.raises(SessionEndedError, match="finished"):
        store.finish("s", SessionStatus.FINISHED, {"reward": 1.0})
    with pytest.raises(InvariantError, match="finished or expired"):
        store.finish("s", SessionStatus.OPEN)
    store = reopen()
    store.acquire("s")
    with pytest.raises(SessionEndedError, match="finished"):
        store.commit([make_commit("s", 1)])
    loaded = store.load("s")
    assert loaded is not None
    assert (loaded.record.status, loaded.record.outcome) == (SessionStatus.FINISHED, {"reward": 0.5})
    assert len(loaded.turns) == 1


def test_open_sessions_expire_at_their_time_and_keep_what_they_recorded(store, reopen):
    for name, expires_s in (("early", 10.0), ("late", 11.0), ("finished", 5.0)):
        store.create(make_session(name, expires_s=expires_s))
    store.commit([make_commit("early", 0)])
    store.finish("finished", SessionStatus.FINISHED)
    assert store.expire(9.9) == []
    assert store.expire(10.0) == ["early"]
    assert store.expire(10.0) == []
    with pytest.raises(SessionEndedError, match="expired"):
        store.commit([make_commit("early", 1)])
    store = reopen()
    assert [r.status.value for r in store.list_sessions()] == ["expired", "open", "finished"]
    loaded = store.load("early")
    assert loaded is not None
    assert len(loaded.turns) == 1


def test_sessions_that_have_ended_are_found_by_name(store):
    for name in ("open", "finished", "expired", "deleted"):
        store.create(make_session(name, expires_s=1.0 if name == "expired" else 2e9))
    store.finish("finished", SessionStatus.FINISHED)
    store.expire(1.0)
    store.delete("deleted")
    names = ["open", *(f"unknown {k}" for k in range(1200)), "deleted", "expired", "finished"]
    assert store.find_ended(names) == names[1:]
    assert store.find_ended(["open"]) == store.find_ended([]) == []


def test_threads_share_a_store(store):
    """Sessions with the same image come and go at the same time; each load sees all of a commit or nothing."""
    images = {CAT_SHA256: CAT, DOG_SHA256: DOG}

    def work(name: str) -> None:
        for k in range(6):
            store.create(make_session(name))
            order = images if k % 2 else dict(reversed(images.items()))
            messages = tuple(show_image(node, sha256) for node, sha256 in enumerate(order))
            store.commit([TurnCommit(session_id=name, images=order, messages=messages), make_commit(name, 1)])
            loaded = store.load(name)
            assert loaded is not None
            assert (len(loaded.messages), len(loaded.turns)) == (4, 1)
            assert store.load_image(CAT_SHA256) == CAT
            assert store.delete(name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, "abcd"))
    assert store.list_sessions() == []
    assert store.load_image(CAT_SHA256) is None


def test_a_deleted_session_leaves_nothing_and_its_name_is_free(store, reopen):
    store.create(make_session("s"))
    store.create(make_session("other"))
    store.commit([make_commit("s", 0), make_commit("other", 0)])
    assert store.delete("s") is True
    assert store.delete("s") is False
    assert store.load("s") is store.find_by_key(digest_key("key of s")) is None
    store = reopen()
    store.create(make_session("s"))
    loaded, other = store.load("s"), store.load("other")
    assert loaded is not None
    assert other is not None
    assert (loaded.turns, loaded.messages, loaded.tools, loaded.counters) == ((), (), {}, {})
    assert (len(other.turns), other.tools) == (1, {"tools": TOOLS})


def test_an_image_is_stored_once_and_goes_with_the_last_session_that_has_it(store):
    for name in "ab":
        store.create(make_session(name))
    images = {CAT_SHA256: CAT}
    store.commit([TurnCommit(session_id="a", messages=(show_image(0, CAT_SHA256),), images=images)])
    store.commit([TurnCommit(session_id="b", turns=(make_turn(0, image=CAT),))])  # its bytes are stored already
    store.commit([TurnCommit(session_id="b", messages=(show_image(0, CAT_SHA256),), images=images)])
    assert store.load_image(CAT_SHA256) == CAT
    assert store.load_image(DOG_SHA256) is store.load_image("no digest") is None
    store.delete("a")
    assert store.load_image(CAT_SHA256) == CAT
    store.delete("b")
    assert store.load_image(CAT_SHA256) is None


def test_a_session_has_the_images_that_it_refers_to(store):
    for name in ("s", "other"):
        store.create(make_session(name))
    store.commit([TurnCommit(session_id="s", images={CAT_SHA256: CAT}, messages=(show_image(0, CAT_SHA256),))])
    assert store.has_image("s", CAT_SHA256)
    assert not any(store.has_image(name, CAT_SHA256) for name in ("other", "none", "\0"))
    assert not any(store.has_image("s", sha256) for sha256 in (DOG_SHA256, "\0"))


def test_tools_are_no_images(store):
    store.create(make_session("s"))
    store.commit([TurnCommit(session_id="s", tools={"t": ()})])
    assert store.load_image(hashlib.sha256(b"[]").hexdigest()) is None


def test_a_session_is_owned_by_its_creator_until_it_is_released(store):
    store.create(make_session("s"))
    assert store.acquire("s") is True
    store.release("s")
    store.release("s")
    with pytest.raises(NotOwnerError):
        store.commit([make_commit("s", 0)])
    assert store.acquire("s") is True
    store.commit([make_commit("s", 0)])


def test_the_next_process_acquires_what_the_last_one_owned(store, reopen):
    store.create(make_session("s"))
    store = reopen()
    assert store.acquire("s") is True
    store.commit([make_commit("s", 0)])


def test_a_closed_store_says_so(store):
    store.create(make_session("s"))
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.load("s")
    with pytest.raises(StoreError, match="is closed"):
        store.commit([make_commit("s", 0)])


def test_sessions_of_an_earlier_version_are_migrated_and_those_of_a_later_one_refused(store, reopen, location):
    """A migration that fails changes nothing, and what is refused is left alone."""
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store.close()
    with pytest.raises(StoreError, match="missing"):
        open_later_store(location, BROKEN)
    assert len(reopen().load("s").turns) == 1
    reopen().close()
    for _ in range(2):
        later = open_later_store(location)
        assert len(later.load("s").turns) == 1
        assert later._read_one("SELECT title FROM sessions WHERE session_id = ?", "s")[0] == "untitled"
        later.close()
    later_version = len(MIGRATIONS) + 1
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"of schema version {later_version}, .* up to {len(MIGRATIONS)}: use"):
            reopen()
