"""What a server of the Tinker API keeps: one server a store, connections that are lost, and how long."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tinker_loops import add_sequences, record
from unbroken.errors import InvalidInputError, StoreError
from unbroken.ledger.store import open_snapshots
from unbroken.tinker import store as store_module
from unbroken.tinker.options import TinkerOptions
from unbroken.tinker.store import (
    TINKER_TABLES,
    CallResult,
    Checkpoint,
    ModelFacts,
    RecordedSequence,
    TinkerStore,
    hash_content,
)

FACTS = ModelFacts(model_id="run", base_model="tiny", lora=None, user_metadata={"a": "\0\ud800"})
SAVED = Checkpoint(
    path="tinker://run/weights/a",
    folder=f"a-{'0' * 32}",
    model_id="run",
    base_model="tiny",
    lora={"rank": 4},
    version=3,
    num_bytes=1,
)


def make_call(name: str = "s:sample:0:1", number: int = 2) -> list[RecordedSequence]:
    return [record(f"{name}:{index}", [5, 6, 7], [8, index]) for index in range(number)]


def select(location: str, query: str) -> list[Any]:
    """What another process reads."""
    return open_snapshots(location, TINKER_TABLES).read(lambda cursor: cursor.select(query))


def write_files(store: TinkerStore, checkpoint: Checkpoint = SAVED) -> Path:
    folder = store.folder_of(checkpoint)
    folder.mkdir(parents=True)
    return folder


def test_a_store_is_one_servers_and_keeps_what_was_acknowledged(open_store):
    store = open_store()
    with pytest.raises(StoreError, match=r"--tinker-store: store must be a .* that no other process uses.*, and .*"):
        open_store()
    store.put_model(FACTS, owner="me")
    path = SAVED.path
    store.put_checkpoint(SAVED, owner="me")
    write_files(store)
    store.close()
    store = open_store()
    ended = store.find_model("run", owner="me")
    assert ended == replace(FACTS, used=ended.used, ended="the server stopped")
    assert store.find_model("run", owner="other") is None
    found = store.find_checkpoint(path, owner="me")
    assert found == SAVED
    assert found.is_for_training
    assert store.find_checkpoint(path, owner="other") is None
    store.delete_checkpoint(found)
    assert not store.folder_of(SAVED).exists()
    expired = replace(SAVED, expires=found.made)
    store.put_checkpoint(expired, owner="me")
    assert store.find_checkpoint(path, owner="me") is None
    write_files(store)
    store.close()
    open_store()
    assert not store.folder_of(SAVED).exists()


def test_completions_of_a_call_are_found_by_their_names_and_ids(open_store):
    store, call = open_store(), make_call(number=12)
    add_sequences(store, call)
    for given in call:
        found = store.find_sequence(given.sequence_id, owner="me")
        np.testing.assert_equal(asdict(found), asdict(given))
    (by_content,) = store.find_by_content(hash_content(call[3].prompt_ids, call[3].sampled.completion_ids), owner="me")
    assert by_content.sequence_id == call[3].sequence_id
    assert store.find_sequence(call[3].sequence_id, owner="other") is None
    for name in ("nobody", "\0", "\ud800", ""):
        assert store.find_sequence(name, owner="me") is None
        assert store.find_result(name, owner="me") is None
    with pytest.raises(StoreError):  # what was answered does not change
        add_sequences(store, call)


def test_a_result_is_found_with_its_digest_and_its_answer_forgotten_before_it(open_store, location, monkeypatch):
    store, clock = open_store(keep_days=1), [1000.0]
    monkeypatch.setattr(store_module.time, "time", lambda: clock[0])
    given = CallResult(answer=b"\x00a", is_protobuf=True)
    store.put_result("call", b"digest", given, owner="me")
    assert store.find_result("call", owner="me") == (b"digest", given)
    assert store.find_result("call", owner="other") is None
    with pytest.raises(StoreError):
        store.put_result("call", b"digest", given, owner="me")
    store.close()
    store = open_store(keep_days=1)
    assert store.find_result("call", owner="me") == (b"digest", given)
    clock[0] += store_module.ANSWERS_KEPT_S + 1
    store.put_result("next", b"", given, owner="me")
    assert store.find_result("call", owner="me") == (b"digest", replace(given, answer=None))
    assert store.find_result("next", owner="me") == (b"", given)
    clock[0] += 86401
    store.put_result("last", b"", given, owner="me")
    assert select(location, "SELECT id FROM results") == [("last",)]


def test_sequences_are_removed_after_their_time_a_few_with_each_call(open_store, location, monkeypatch):
    store = open_store(keep_days=2)
    clock = [1000.0]
    monkeypatch.setattr(store_module.time, "time", lambda: clock[0])

    def find(name: str) -> list[Any]:
        return [each for n in range(2) if (each := store.find_sequence(f"{name}:{n}", owner="me"))]

    for number in range(6):
        add_sequences(store, make_call(f"old:{number}"))
    clock[0] += 2 * 86400 - 1
    add_sequences(store, make_call("new:0"))
    assert find("old:0")
    clock[0] += 2
    for number, left in ((1, 6), (2, 0), (3, 0)):
        add_sequences(store, make_call(f"new:{number}"))
        assert len([each for number in range(6) for each in find(f"old:{number}")]) == left
    assert all(len(find(f"new:{each}")) == 2 for each in range(4))
    assert [len(select(location, f"SELECT * FROM {table}")) for table in ("sequences", "prompts")] == [8, 4]


def test_training_runs_that_ended_are_removed_with_their_steps_unless_they_have_checkpoints(
    open_store, location, monkeypatch
):
    store, clock = open_store(keep_days=2), [1000.0]
    monkeypatch.setattr(store_module.time, "time", lambda: clock[0])
    for name in ("run", "gone", "works"):
        store.put_model(replace(FACTS, model_id=name, used=clock[0]), owner="me")
        store.add_step(name, 1, {})
    store.put_checkpoint(SAVED, owner="me")
    for name in ("run", "gone"):
        store.end_model(name, "the end")
    clock[0] += 2 * 86400 + 1
    store.put_model(replace(FACTS, model_id="new", used=clock[0]), owner="me")
    assert {each.model_id for each in store.list_models(owner="me")} == {"run", "works", "new"}
    assert sorted(select(location, "SELECT model FROM steps")) == [("run",), ("works",)]


def test_a_reader_sees_steps_and_changes(open_store, location):
    store = open_store()
    snapshots = open_snapshots(location, TINKER_TABLES)
    revisions = [snapshots.find_revision()]
    for change in (
        lambda: store.add_step("run", 1, {"loss:sum": 0.5}),
        lambda: store.put_model(FACTS, owner="me"),
        lambda: add_sequences(store, make_call()),
    ):
        change()
        revisions.append(snapshots.find_revision())
    assert len(set(revisions)) == 4
    ((model, version, metrics),) = select(location, "SELECT model, version, metrics FROM steps")
    assert (model, version, json.loads(metrics)) == ("run", 1, {"loss:sum": 0.5})


@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_a_connection_that_is_lost_is_made_again_and_an_error_names_the_database(postgres, open_store, monkeypatch):
    monkeypatch.setattr("unbroken.ledger.store.postgres._WAIT_S", 0.2)
    store = open_store()
    store.put_model(FACTS, owner="me")
    postgres.cut_connections(store)
    assert store.find_model("run", owner="me") is not None
    store.end_model("run", "the end")
    postgres.stop()
    try:
        for call in (lambda: store.find_model("run", owner="me"), lambda: add_sequences(store, make_call())):
            with pytest.raises(StoreError, match=r"the PostgreSQL database 'postgres' on .* cannot be used"):
                call()
    finally:
        postgres.start()
    add_sequences(store, make_call())
    assert store.find_model("run", owner="me").ended == "the end"
    assert store.find_sequence("s:sample:0:1:1", owner="me")


@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_a_server_that_was_cut_off_writes_nothing_after_another_began(postgres, open_store, monkeypatch):
    monkeypatch.setattr("unbroken.ledger.store.postgres._WAIT_S", 0.2)
    first = open_store()
    first.put_model(FACTS, owner="me")
    postgres.cut_connections(first)
    second = open_store()
    assert second.find_model("run", owner="me").ended == "the server stopped"
    with pytest.raises(StoreError, match=r"owner 1 of the sampled sequences in .* is another process now"):
        add_sequences(first, make_call())
    add_sequences(second, make_call())
    first.close()
    with pytest.raises(StoreError, match="that no other process uses"):
        open_store()


@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_each_database_has_a_folder_of_its_own_for_files(postgres, open_store, tmp_path):
    first = open_store()
    first.put_checkpoint(SAVED, owner="me")
    folder = write_files(first)
    first.close()
    postgres.remove_sessions()
    other = open_store()
    write_files(other)
    other.put_checkpoint(SAVED, owner="me")
    other.close()
    open_store().close()
    assert folder.exists()
    assert first.folder.parent == other.folder.parent == tmp_path / "files"
    assert first.folder != other.folder
    with pytest.raises(InvalidInputError, match="--tinker-files must be a folder that can be written"):
        open_store(files=Path("/dev/null"))


def test_options_of_a_store(tmp_path):
    with pytest.raises(InvalidInputError, match=r"--tinker-files must not be given without a --tinker-store .* URL"):
        TinkerOptions(tinker_files=tmp_path)
    with pytest.raises(InvalidInputError, match="--tinker-keep-days must be > 0, got 0"):
        TinkerOptions(tinker_keep_days=0)
    with pytest.raises(InvalidInputError, match=r"--tinker-store: .* a folder or a postgresql:// URL, got .* mysql"):
        TinkerStore("mysql://x")


@pytest.mark.parametrize(
    "facts", ["", "{", "[]", "null", '{"model_id": "run"}', '{"no_such_fact": 1}', "[" * 100_000, None]
)
@pytest.mark.parametrize("table", ["models", "checkpoints"])
def test_a_damaged_cell_is_named(open_store, table, facts):
    """None: a value of another type in facts that are otherwise whole."""
    store = open_store()
    store.put_model(FACTS, owner="me")
    store.put_checkpoint(SAVED, owner="me")
    if facts is None:
        facts = json.dumps({**asdict(FACTS if table == "models" else SAVED), "lora": 5})
    store._write(lambda cursor: cursor.execute(f"UPDATE {table} SET facts = ?", (facts,)))
    with pytest.raises(
        StoreError, match=rf"^{table}\.facts of the Tinker server's store must be as the server wrote it"
    ):
        (store.list_models if table == "models" else store.list_checkpoints)(owner="me")


@pytest.mark.parametrize(
    ("column", "value"), [("versions", "[[1]]"), ("sampling", "{"), ("finish", "never"), ("ids", b"x")]
)
def test_a_damaged_sequence_is_named(open_store, column, value):
    store = open_store()
    (call, *_) = make_call(number=1)
    add_sequences(store, [call])
    store._write(lambda cursor: cursor.execute(f"UPDATE sequences SET {column} = ?", (value,)))
    with pytest.raises(StoreError, match="sequences of the Tinker server's store must be as the server wrote it"):
        store.find_sequence(call.sequence_id, owner="me")
