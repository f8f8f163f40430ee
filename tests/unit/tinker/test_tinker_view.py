"""What `unbroken view` reads of a Tinker server's store, in each database, also while the server works on it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from support.recorded_sessions import write_tokenizer
from support.servers import server_tokenizer
from support.sessions import open_later_store
from support.tinker_loops import add_sequences, record
from unbroken.errors import StoreError
from unbroken.ledger.store.tables import MIGRATIONS
from unbroken.tinker.store import Checkpoint, ModelFacts, RecordedSequence, TinkerStore
from unbroken.types import FinishReason
from unbroken.viewer.resources import Resources, open_runs

RUN = ModelFacts(model_id="s:train:0", base_model="tiny", lora={"rank": 4}, used=10.0, user_metadata={"a": "\0\ud800"})
SAVED = Checkpoint(
    path="tinker://s:train:0/weights/a", model_id="s:train:0", base_model="tiny", lora={}, version=1, num_bytes=1
)


def make_sequence(name: str, text: str = "word", model_id: str = "s:train:0") -> RecordedSequence:
    prompt_ids, ids = (server_tokenizer().encode(each) for each in ("a prompt", text))
    return record(name, prompt_ids, ids, cut=1, model_id=model_id, finish=FinishReason.LENGTH)


def fill(store: TinkerStore) -> None:
    store.put_model(replace(RUN, model_id="s:train:1", lora=None, used=20.0), owner="me")
    store.put_model(RUN, owner="other")
    store.put_checkpoint(SAVED, owner="other")
    store.end_model("s:train:0", "its client has finished")
    for number in range(101):
        add_sequences(store, [make_sequence(f"s:sample:0:{number}:0", f"sampled as number {number}")])
    add_sequences(store, [make_sequence(f"s:sample:9:0:{number}", model_id="") for number in range(11)])
    store.add_step("s:train:0", 1, {"loss:sum": 2.5, "provenance_proven:sum": 7.0})
    store.add_step("s:train:0", 2, {"loss:sum": 1.5})


@pytest.fixture
def resources(location, open_store, tmp_path) -> Resources:
    fill(open_store())
    return open_runs([location], tokenizer=write_tokenizer(tmp_path / "tokenizer"))


def test_training_runs_are_listed_in_their_order_with_what_each_has(resources):
    (run,) = resources.get("index")["runs"]
    assert (run["kind"], run["state"]) == ("tinker", "running")
    base, first, second = resources.get("run/0")["training_runs"]
    assert (base["model_id"], base["base_model"], base["num_sequences"]) == ("", "tiny", 11)
    assert (first["model_id"], first["lora"], first["ended"]) == ("s:train:0", {"rank": 4}, "its client has finished")
    assert (first["num_steps"], first["num_sequences"], first["checkpoints"]) == (2, 101, [SAVED.path])
    assert first["pages"] == [2_000_000, 2_000_001]
    assert (second["lora"], second["ended"], second["num_sequences"], second["pages"]) == (None, None, 0, [3_000_000])


def test_a_page_has_the_newest_sequences_first_and_the_numbers_of_the_steps(resources):
    page = resources.get("run/0/step/2000001")
    assert [line["trajectory"] for line in page["trajectories"]] == ["s:sample:0:100:0"]
    assert page["metrics"] == {"steps": [1, 2], "values": {"loss:sum": [2.5, 1.5], "provenance_proven:sum": [7, None]}}
    lines = resources.get("run/0/step/2000000")["trajectories"]
    assert [(line["index"], line["trajectory"]) for line in (lines[0], lines[-1])] == [
        (99, "s:sample:0:99:0"),
        (0, "s:sample:0:0:0"),
    ]
    assert lines[0]["text"].startswith("sampled as number 99")
    assert (lines[0]["note"], lines[0]["is_truncated"]) == ("version 3–4", True)
    assert resources.get("run/0/step/3000000")["trajectories"] == []
    of_one_call = resources.get("run/0/step/1000000")["trajectories"]
    assert [line["trajectory"] for line in of_one_call] == [f"s:sample:9:0:{n}" for n in range(10, -1, -1)]
    for unknown in (0, 999_999, 2_000_002, 4_000_000):
        with pytest.raises(LookupError):
            resources.get(f"run/0/step/{unknown}")


def test_a_sequence_is_a_rollout_with_its_ids_texts_logprobs_and_versions(resources):
    shown = resources.get("run/0/step/2000000/rollout/7")
    sequence = make_sequence("s:sample:0:7:0", "sampled as number 7")
    record, start = shown["record"], len(sequence.prompt_ids)
    assert record["trajectory"] == "s:sample:0:7:0"
    assert [message["content"] for message in record["messages"]] == ["a prompt", "sampled as number 7"]
    (row,) = record["rows"]
    assert row["token_ids"] == [*sequence.prompt_ids.tolist(), *sequence.sampled.completion_ids.tolist()]
    assert row["rollout_logprobs"] == pytest.approx(sequence.sampled.rollout_logprobs.tolist())
    assert row["policy_versions"] == [[start, start + 1, 3], [start + 1, len(row["token_ids"]), 4]]
    assert record["turns"][0]["finish_reason"] == "length"
    assert shown["session"]["settings"]["training_run"] == "s:train:0"
    with pytest.raises(LookupError):
        resources.get("run/0/step/2000001/rollout/1")


@pytest.mark.parametrize("location", ["postgres"], indirect=True)
def test_a_database_is_refused_by_the_reason_of_the_store_that_it_has(location):
    newest = len(MIGRATIONS)
    for migrations, text in (
        ([], "version 0, .*: a gateway of this release"),
        ([()] * (newest + 1), f"version {newest + 1}, and .* knows versions up to {newest}"),
    ):
        open_later_store(location, migrations).close()
        with pytest.raises(StoreError, match=f"has sessions of schema {text}"):
            open_runs([location])


def test_all_pages_can_be_exported(resources):
    paths = list(resources.list_paths())
    assert len(paths) == len(set(paths)) == 2 + 4 + 2 * 112
    for path in paths[:20]:
        json.dumps(resources.get(path), allow_nan=False)
    assert list(resources.list_images()) == []
