"""What `unbroken view` reads of a gateway's store: sessions as rollouts, with branches, forks, images and versions."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.gateways import USER, ask, running_gateway, scripted
from support.image_servers import CAT, expanded
from support.recorded import write_run
from support.recorded_sessions import SHOWN, finish, recording_gateway, write_image_store, write_store, write_tokenizer
from support.servers import server_tokenizer
from support.sessions import make_commit, make_session
from unbroken.cli import main
from unbroken.ledger.store import open_store
from unbroken.runs.config import RendererConfig
from unbroken.runs.folder import claim_folder
from unbroken.runs.prompts.built_in import Config
from unbroken.runs.prompts.dataset import DataConfig
from unbroken.runs.prompts.rewards import RewardConfig
from unbroken.runs.python_files import FunctionName
from unbroken.runs.settings import describe
from unbroken.training.config import LoopConfig
from unbroken.viewer.resources import open_runs
from unbroken.viewer.sources.retokenised import load_template_texts
from unbroken.viewer.sources.runs import RunReader
from unbroken.viewer.sources.stores import PAGE_SIZE, StoreRun


def read_tree(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


async def test_sessions_are_listed_with_state_model_turns_ids_and_reward(tmp_path):
    names = await write_store(tmp_path)
    before = read_tree(tmp_path)
    resources = open_runs([tmp_path])
    assert list(resources.list_paths()) == ["index", "run/0", "run/0/step/0"] + [
        f"run/0/step/0/rollout/{n}{part}" for n in range(2) for part in ("", "/retokenised")
    ]
    run = resources.get("run/0")
    assert (run["kind"], run["sessions"], run["recorded_steps"]) == ("store", {"finished": 1, "open": 1}, [0])
    first, empty = resources.get("run/0/step/0")["trajectories"]
    assert [first["trajectory"], empty["trajectory"]] == names
    assert (first["state"], first["status"], first["reward"], first["model"]) == ("finished", "completed", 0.5, "tiny")
    assert (first["num_turns"], first["num_rows"], first["forks"]) == (4, 3, ["edited_reply"])
    assert first["num_sampled"] > 20
    assert first["is_trained"] is None
    assert (empty["state"], empty["status"], empty["reward"], empty["num_turns"]) == ("open", "open", None, 0)
    for path in resources.list_paths():
        json.dumps(resources.get(path), allow_nan=False)
    assert read_tree(tmp_path) == before


async def test_a_session_is_a_rollout_with_branches_forks_and_messages_of_each(tmp_path):
    await write_store(tmp_path / "store")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    shown = open_runs([tmp_path / "store"], tokenizer=tokenizer).get("run/0/step/0/rollout/0")
    record = shown["record"]
    assert [row["messages"] for row in record["rows"]] == [[0, 1, 2, 3], [0, 4, 5, 6], [7, 8, 9]]
    tools = [[tool["function"]["name"] for tool in row["tools"]] for row in record["rows"]]
    assert tools == [["look"], ["look"], []], "the sub-agent has none, and took the last turn"
    assert [tool["function"]["name"] for tool in record["tools"]] == ["look"]
    assert [message["role"] for message in record["messages"][4:7]] == ["assistant", "tool", "assistant"]
    assert shown["turn_of_message"] == {1: 0, 3: 1, 6: 2, 9: 3}
    assert [(fork["row"], fork["reason"]) for fork in shown["forks"]] == [(1, "edited_reply"), (2, "new_conversation")]
    assert shown["forks"][0]["ids"][0] != shown["forks"][0]["ids"][1]
    assert shown["session"]["settings"]["metadata"] == {"task": SHOWN}
    for row in record["rows"]:
        for start, stop, index in row["message_indices"]:
            text = "".join(shown["texts"][token_id] for token_id in row["token_ids"][start:stop])
            assert index in row["messages"]
            message = record["messages"][index]
            assert message["role"] == "assistant" or message["content"][-4:] in text
        num_sampled = sum(s["stop"] - s["start"] for s in row["segments"] if s["origin"] == "sampled")
        assert len(row["rollout_logprobs"]) == num_sampled
        assert sum(stop - start for start, stop, _ in row["policy_versions"]) == num_sampled
        assert row["trainer_logprobs"] is None
        assert row["advantages"] == []
    assert record["turns"][1]["bridge"] is True


async def test_a_live_store_is_read_turn_by_turn(tmp_path):
    async with recording_gateway(tmp_path) as (gateway, created):
        resources = open_runs([tmp_path])
        index = resources.get("index")["runs"][0]
        assert index["state"] == "running"
        assert resources.get("run/0/step/0")["trajectories"][0]["num_turns"] == 4
        await ask(gateway.agent(created), [USER])
        assert resources.get("index")["runs"][0]["revision"] != index["revision"]
        assert resources.get("run/0/step/0")["trajectories"][0]["num_turns"] == 5
        branch = resources.get("run/0/step/0/rollout/0")["forks"][-1]
        assert branch["reason"] == "sampled_again"
        await finish(gateway, created, reward=1.0)
        assert resources.get("run/0/step/0")["trajectories"][0]["reward"] == 1.0


async def test_images_are_where_they_stand_and_their_files_are_given_out(tmp_path):
    await write_image_store(tmp_path)
    resources = open_runs([tmp_path])
    shown = resources.get("run/0/step/0/rollout/0")
    (row,) = shown["record"]["rows"]
    (image,) = row["images"]
    assert image["sha256"] == CAT.sha256
    assert row["token_ids"][image["start"] : image["stop"]] == expanded(CAT)
    assert {"type": "image", "sha256": CAT.sha256} in shown["record"]["messages"][0]["content"]
    assert list(resources.list_images()) == [f"run/0/image/{CAT.sha256}"]
    assert resources.get_image(f"run/0/image/{CAT.sha256}") == CAT.data
    with pytest.raises(LookupError, match="no image"):
        resources.get_image(f"run/0/image/{'0' * 64}")


def test_a_link_to_a_session_stays_right_when_others_are_deleted(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(PAGE_SIZE + 2):
        store.create(make_session(f"s{number}"))
    resources = open_runs([tmp_path])
    assert resources.get("run/0")["recorded_steps"] == [0, 1]
    assert resources.get("run/0/step/1/rollout/1")["record"]["trajectory"] == f"s{PAGE_SIZE + 1}"
    for number in (0, PAGE_SIZE):
        store.delete(f"s{number}")
    assert [each["index"] for each in resources.get("run/0/step/1")["trajectories"]] == [1]
    assert resources.get("run/0/step/1/rollout/1")["record"]["trajectory"] == f"s{PAGE_SIZE + 1}"
    with pytest.raises(LookupError, match="no session 1"):
        resources.get("run/0/step/0/rollout/0")
    with pytest.raises(LookupError, match="no sessions from 201"):
        resources.get("run/0/step/2")
    store.close()


def test_a_store_is_shown_beside_a_run_and_knows_the_run_that_it_belongs_to(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "recipe.json").write_text(json.dumps({"settings": {"model": "some/model"}}))
    place = run / "sessions" / "process-0"
    open_store(str(place)).close()
    index = open_runs([run, place]).get("index")
    assert [(each["kind"], each["name"], each["model"]) for each in index["runs"]] == [
        ("run", "run", "some/model"),
        ("store", "process-0", "some/model"),
    ]


async def test_a_session_is_retokenised_with_the_options_that_its_template_had(tmp_path):
    """Those of the run, and those of the session before them."""
    for name in ("rows.jsonl", "rewards.py"):
        (tmp_path / name).touch()
    config = Config(
        output=tmp_path / "run",
        loop=LoopConfig(num_steps=1),
        model="m",
        data=DataConfig(file=tmp_path / "rows.jsonl"),
        rewards=(RewardConfig(function=FunctionName(f"{tmp_path}/rewards.py:reward")),),
        renderer=RendererConfig(template_kwargs={"mood": "calm", "name": "Ann"}, parser="hermes"),
    )
    claim_folder(tmp_path / "run", "a recipe", describe(config))
    store = tmp_path / "run" / "sessions" / "process-0"
    store.parent.mkdir()
    async with running_gateway(scripted("It is 17.<|im_end|>"), store) as gateway:
        created = await gateway.create(template_options={"mood": "loud"})
        await ask(gateway.agent(created), [USER])
    tokenizer = server_tokenizer()
    tokenizer.chat_template = "{{ mood }} {{ name }}" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = StoreRun(str(store), name="store", tokenizer=tmp_path / "tokenizer")
    found = source.find_template(source.read_trajectory(0, 0))
    assert found is not None
    texts = load_template_texts(found)
    assert texts is not None
    assert texts.render_text([USER]).startswith("loud Ann")
    found = RunReader(tmp_path / "run", tokenizer=tmp_path / "tokenizer").find_template({"model": "m"})
    assert found is not None
    texts = load_template_texts(found)
    assert texts is not None
    assert texts.render_text([USER]).startswith("calm Ann")


def test_a_folder_of_stores_is_refused_with_their_names(tmp_path, capsys):
    open_store(str(tmp_path / "process-0")).close()
    assert main(["view", str(tmp_path)]) == 1
    assert "in which there are the stores process-0" in capsys.readouterr().err


def test_the_number_of_a_session_is_checked(tmp_path):
    store = open_store(str(tmp_path))
    store.create(make_session("s"))
    store.commit([make_commit("s", 0)])
    store.close()
    with pytest.raises(LookupError):
        open_runs([tmp_path]).get(f"run/0/step/0/rollout/{PAGE_SIZE}")


def test_a_page_of_sessions_opens_in_2_s(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(PAGE_SIZE):
        store.create(make_session(f"s{number}"))
        store.commit([make_commit(f"s{number}", turn, num_ids=300, text="x" * 500) for turn in range(12)])
    store.close()
    start = time.process_time()
    resources = open_runs([tmp_path])
    assert len(resources.get("run/0/step/0")["trajectories"]) == PAGE_SIZE
    assert resources.get("run/0/step/0/rollout/99")["record"]["trajectory"] == "s99"
    assert time.process_time() - start < 2.0
