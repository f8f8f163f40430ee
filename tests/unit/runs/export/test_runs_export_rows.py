"""`unbroken export` of rollouts: the same ids, masks, logprobs and versions in each form, of runs and of stores."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import httpx
import numpy as np
import pyarrow.parquet
import pytest

from support.gateways import CALL, TOOLS, USER, result, running_gateway, scripted
from support.postgres import location, postgres  # noqa: F401
from support.recorded import make_forked, make_rich, make_row, make_trajectory, write_run, write_step
from support.recorded_sessions import SUB_AGENT, write_image_store, write_store
from support.sessions import make_commit, make_session, make_turn
from unbroken.cli import main
from unbroken.client import AsyncClient
from unbroken.ledger.records import SessionStatus
from unbroken.ledger.store import open_store
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.agents.session import AgentSession
from unbroken.rollout.limits import Limits
from unbroken.runs.records.files import read_records, summarize
from unbroken.runs.records.record import describe_rewards, write_groups
from unbroken.server.process import host_app
from unbroken.types import SamplingParams
from unbroken.viewer.resources import open_runs
from unbroken.viewer.sources.stores import StoreRun

TOOL_TURNS = make_trajectory(
    "g3/0",
    [
        {
            "token_ids": [1, 2, 3, 4, 5, 6],
            "segments": [
                {"start": 0, "stop": 2, "origin": "prompt", "node": 0},
                {"start": 2, "stop": 4, "origin": "sampled", "node": 1},
                {"start": 4, "stop": 5, "origin": "bridge", "node": 2},
                {"start": 5, "stop": 6, "origin": "sampled", "node": 3},
            ],
            "message_indices": [[1, 2, 0], [4, 5, 2]],
            "rollout_logprobs": [-0.125, -0.25, -0.375],
            "trainer_logprobs": None,
            "policy_versions": [[2, 4, 7], [5, 6, 8]],
            "temperature": 1.0,
            "is_trained": True,
            "loss": [[2, 4], [5, 6]],
            "advantages": [[2, 4, 0.5], [5, 6, 0.5]],
            "images": [],
        }
    ],
    reward=0.25,
    data={"index": 3, "columns": {"prompt": "2 + 2?", "answer": "4"}},
    messages=[
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I add.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "add"},
        {"role": "assistant", "content": "It is 4."},
    ],
)
"""The rollout of docs/rollouts.md."""


def export(source: Path | str, target: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["export", str(source), str(target), *words]) == 0
    if target.suffix == ".parquet":
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(target).to_pylist()
        return rows
    return [json.loads(line) for line in target.read_text("utf-8").splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_step(tmp_path / "run", 3, [TOOL_TURNS])
    return tmp_path / "run"


def test_a_row_has_an_entry_for_each_id_and_null_where_nothing_was_sampled(tmp_path, run):
    (row,) = export(run, tmp_path / "rows.parquet")
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["sampled_mask"] == row["loss_mask"] == [False, False, True, True, False, True]
    assert row["rollout_logprobs"] == [None, None, -0.125, -0.25, None, -0.375]
    assert row["policy_versions"] == [None, None, 7, 7, None, 8]
    assert row["advantages"] == [None, None, 0.5, 0.5, None, 0.5]
    assert (row["trainer_logprobs"], row["is_trained"], row["temperature"]) == (None, True, 1.0)
    assert (row["kind"], row["step"], row["tokenizer"], row["reward"]) == ("training", 3, "no-such-model", 0.25)
    assert (row["group"], row["trajectory"], row["branch"]) == ("g3", "g3/0", 0)
    assert json.loads(row["messages"]) == TOOL_TURNS["messages"]
    assert json.loads(row["data"])["columns"]["answer"] == "4"
    (line,) = export(run, tmp_path / "rows.jsonl")
    texts = ("messages", "tools", "data", "reward_parts", "images", "controls")
    assert line == {**row, **{name: json.loads(row[name]) for name in texts}}


def test_trl_gets_messages_and_the_ids_of_a_rollout_function_and_of_a_tokenised_data_set(tmp_path, run):
    (row,) = export(run, tmp_path / "rows.parquet", "--form", "trl")
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert [message["role"] for message in row["completion"]] == ["assistant", "tool", "assistant"]
    assert row["completion"][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    assert (row["prompt_ids"], row["completion_ids"], row["env_mask"]) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert row["logprobs"][:2] == [-0.125, -0.25]
    assert np.isnan(row["logprobs"][2])
    assert (row["input_ids"], row["assistant_masks"]) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    (line,) = export(run, tmp_path / "rows.jsonl", "--form", "trl")
    assert line["logprobs"] == [-0.125, -0.25, None, -0.375]


def test_verl_gets_a_prompt_with_its_answer_and_the_fields_of_an_agent_loop(tmp_path, run):
    (row,) = export(run, tmp_path / "rows.parquet", "--form", "verl")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert row["prompt"] == [{"role": "user", "content": "2 + 2?"}]  # Llama's template takes a null for a call
    assert (len(row["messages"]), "tools" in row) == (4, False)  # verl's SFT reads no null there
    assert (row["prompt_ids"], row["response_ids"], row["response_mask"]) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert row["response_logprobs"] == [-0.125, -0.25, 0.0, -0.375]  # verl has 0 where nothing was sampled
    assert (row["reward_score"], row["num_turns"], row["extra_info"]["step"]) == (0.25, 4, 3)


def test_verl_gets_examples_in_the_prompt_and_tools_as_text(tmp_path, monkeypatch):
    reads: list[Path] = []  # once: what is written meanwhile may have other fields
    monkeypatch.setattr("unbroken.runs.export.rows.read_records", lambda path: reads.append(path) or read_records(path))
    history = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    row = {**TOOL_TURNS["rows"][0], "message_indices": [[0, 1, 1], [1, 2, 2], [4, 5, 4]]}
    shown = {**TOOL_TURNS, "messages": history + TOOL_TURNS["messages"], "tools": [{"type": "function"}], "rows": [row]}
    write_step(tmp_path / "run", 0, [TOOL_TURNS, shown])
    plain, shown = export(tmp_path / "run", tmp_path / "rows.parquet", "--form", "verl")
    assert shown["prompt"] == [*history, {"role": "user", "content": "2 + 2?"}]
    assert (plain["tools"], shown["tools"], len(reads)) == (None, '[{"type": "function"}]', 1)
    assert export(tmp_path / "run", tmp_path / "x.jsonl", "--form=verl")[0]["messages"][3] == TOOL_TURNS["messages"][3]


def test_a_folder_is_one_for_load_from_disk(tmp_path, run, monkeypatch, capsys):
    assert main(["export", str(run), str(tmp_path / "folder"), "--form", "trl"]) == 0
    found = datasets.load_from_disk(str(tmp_path / "folder"))
    assert found[0]["input_ids"] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]

    def fail(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetGenerationError from OSError("No space left on device")

    monkeypatch.setattr("datasets.load_dataset", fail)
    assert main(["export", str(run), str(tmp_path / "other"), "--form", "trl"]) == 1
    assert f"{tmp_path}/other cannot be written: No space left on device" in capsys.readouterr().err


def test_inspect_gets_a_sample_for_each_rollout_with_siblings_as_epochs(tmp_path, run):
    write_step(tmp_path / "evaluated", 0, [])
    folder = tmp_path / "evaluated" / "evaluations" / "hard"
    write_step(tmp_path / "part", 2, [TOOL_TURNS, {**TOOL_TURNS, "trajectory": "g3/1", "reward": 0.75}])
    folder.parent.mkdir()
    (tmp_path / "part" / "rollouts").rename(folder)
    (tmp_path / "evaluated" / "rollouts" / "step-00000000.rank-0.jsonl.gz").unlink()
    log = tmp_path / "log.eval"
    assert main(["export", str(tmp_path / "evaluated"), str(log), "--kind", "hard"]) == 0
    with zipfile.ZipFile(log) as file:
        assert {name for name in file.namelist() if name.startswith("samples/")} == {
            f"samples/hard-2-g3_epoch_{epoch}.json" for epoch in (1, 2)
        }
        header, summaries = (json.loads(file.read(name)) for name in ("header.json", "summaries.json"))
        sample = json.loads(file.read("samples/hard-2-g3_epoch_1.json"))
    assert header["results"]["scores"][0]["metrics"]["mean"]["value"] == 0.5
    assert header["eval"]["dataset"]["sample_ids"] == ["hard-2-g3"]
    assert [each["epoch"] for each in summaries] == [1, 2]
    assert (sample["target"], sample["scores"]["reward"]["value"]) == ("4", 0.25)
    assert sample["messages"][1]["tool_calls"] == [
        {"id": "c", "function": "add", "type": "function", "arguments": {"a": 2, "b": 2}}
    ]
    assert sample["messages"][1]["content"][0] == {"type": "reasoning", "reasoning": "I add."}
    assert sample["metadata"]["rows"][0]["rollout_logprobs"][2] == -0.125


def test_steps_are_chosen_branches_are_rows_and_what_sampled_nothing_is_one_without_ids(tmp_path, capsys):
    write_run(tmp_path / "run")
    rows = export(tmp_path / "run", tmp_path / "all.parquet")
    assert [(row["step"], row["trajectory"], row["branch"], len(row["token_ids"])) for row in rows] == [
        (0, "g0/0", 0, 5), (1, "g0/0", 0, 5), (1, "g0/1", 0, 4), (1, "g0/1", 1, 3), (1, "g0/2", 0, 0)
    ]  # fmt: skip
    assert len(export(tmp_path / "run", tmp_path / "first.parquet", "--steps", ":1")) == 1
    assert len(export(tmp_path / "run", tmp_path / "second.jsonl", "--steps", "1:2")) == 4
    assert len(export(tmp_path / "run", tmp_path / "verl.jsonl", "--form", "verl")) == 4
    write_step(tmp_path / "none", 0, [make_trajectory("g/0", [])])
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "none.parquet"), "--form=trl"]) == 1
    assert "none has no rollouts of these steps with ids" in capsys.readouterr().err


def test_an_evaluation_set_named_training_does_not_hide_the_rollouts_of_training(tmp_path, run):
    write_step(tmp_path / "other", 9, [{**TOOL_TURNS, "reward": 0.75}])
    (run / "evaluations").mkdir()
    (tmp_path / "other" / "rollouts").rename(run / "evaluations" / "training")
    assert [row["reward"] for row in export(run, tmp_path / "a.jsonl")] == [0.25]
    assert [row["reward"] for row in export(run, tmp_path / "b.jsonl", "--kind", "evaluation")] == [0.75]


def test_many_rows_are_written_in_parts(tmp_path, monkeypatch):
    row = make_row([1, 2, 3], num_prompt=2)
    write_step(tmp_path / "run", 0, [make_trajectory(f"g{n}/0", [row]) for n in range(600)])
    export(tmp_path / "run", tmp_path / "rows.parquet")
    assert pyarrow.parquet.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 3
    monkeypatch.setattr("unbroken.runs.export.rows._NUM_ENTRIES", 100)  # long rows
    assert len(export(tmp_path / "run", tmp_path / "long.parquet")) == 600
    assert pyarrow.parquet.ParquetFile(tmp_path / "long.parquet").num_row_groups > 100


async def test_sessions_of_a_store_are_rows_with_the_messages_of_each_branch_and_their_tokenizer(tmp_path):
    names = await write_store(tmp_path / "store")
    rows = export(tmp_path / "store", tmp_path / "rows.jsonl")
    assert [(row["trajectory"], row["branch"]) for row in rows] == [(names[0], n) for n in range(3)] + [(names[1], 0)]
    assert {row["tokenizer"] for row in rows} == {"tiny"}
    assert [len(row["messages"]) for row in rows] == [4, 4, 3, 0]
    assert [message["role"] for message in rows[2]["messages"]] == ["system", "user", "assistant"]
    assert (rows[0]["status"], rows[0]["reward"], rows[0]["reward_parts"]) == ("completed", 0.5, {"exact": 0.5})
    for row in rows[:3]:
        sampled = np.array(row["sampled_mask"])
        assert [each is not None for each in row["rollout_logprobs"]] == row["sampled_mask"]
        assert sampled[np.array(row["loss_mask"])].all()


async def test_rows_of_a_session_have_the_turns_and_tools_of_their_own_branch(tmp_path):
    """The sub-agent, which has no tools, took the last turn of the session."""
    await write_store(tmp_path / "store")
    rows = export(tmp_path / "store", tmp_path / "rows.jsonl")
    assert [[tool["function"]["name"] for tool in row["tools"]] for row in rows] == [["look"], ["look"], [], []]
    replies = [sum(message["role"] == "assistant" for message in row["messages"]) for row in rows]
    # The second branch begins with ids of the first turn, whose reply the agent edited.
    assert [row["num_turns"] for row in rows] == replies == [2, 2, 1, 0]
    assert [row["finish_reasons"] for row in rows] == [["stop", "stop"], ["stop", "stop"], ["stop"], []]


async def look_with_a_sub_agent(session: AgentSession) -> float:
    """Looks, asks a sub-agent, which has no tools, and answers; it asks the sub-agent once more at the end."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(base_url=session.openai_base_url, headers=headers) as client:

        async def say(messages: list[Any], tools: list[Any]) -> dict[str, Any]:
            answer = await client.post("/chat/completions", json={"messages": messages, "tools": tools})
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message

        first = await say([USER], TOOLS)
        await say(SUB_AGENT, [])
        await say([USER, first, result(first)], TOOLS)
        await say([*SUB_AGENT, {"role": "user", "content": "again"}], [])
    return 1.0


async def test_rows_of_an_agent_in_a_run_are_those_of_its_session_in_the_store(tmp_path):
    engine = scripted(f"I look.{CALL}", "A sub-answer.<|im_end|>", "It is 17.<|im_end|>", "Again.<|im_end|>")
    async with (
        running_gateway(engine, tmp_path / "store") as gateway,
        host_app(gateway.app) as url,
        AsyncClient(url) as client,
    ):
        group = await run_agent_group(
            look_with_a_sub_agent, 1, gateway=client.sessions, task={}, sampling=SamplingParams(), limits=Limits()
        )
    head = {"step": 0, "rank": 0, "num_processes": 1, "model": "tiny", "policy_version": 0}
    write_groups(tmp_path / "run" / "rollouts", {**head, **describe_rewards([group.rewards])}, [group])
    of_run, of_store = (export(tmp_path / name, tmp_path / f"{name}.jsonl") for name in ("run", "store"))
    names = ("token_ids", "messages", "tools", "num_turns", "finish_reasons", "policies", "policy_versions")
    assert [[row[name] for name in names] for row in of_run] == [[row[name] for name in names] for row in of_store]
    assert [len(row["messages"]) for row in of_run] == [3, 4, 4]
    assert [[tool["function"]["name"] for tool in row["tools"]] for row in of_run] == [[], ["look"], []]
    (record,) = list(read_records(next((tmp_path / "run" / "rollouts").glob("*.gz"))))[1:]
    assert "tools" not in record["rows"][1], "they are those of the rollout"
    assert summarize(record)["given"] == "It is 17."
    (verl,) = export(tmp_path / "run", tmp_path / "verl.jsonl", "--form", "verl")[:1]
    assert [message["content"] for message in verl["prompt"]] == [message["content"] for message in SUB_AGENT]


@pytest.mark.parametrize("form", ["trl", "verl"])
def test_forms_without_a_place_for_sampling_controls_say_how_many_rows_had_which(tmp_path, caplog, form):
    first, *later = TOOL_TURNS["turns"]
    changed = {"controls": {"logit_bias": [[3, 1.0]], "min_tokens": 2, "stop_token_ids": [9]}, "is_cut": True}
    records = [{**TOOL_TURNS, "turns": [{**first, **changed}, *later]}, {**TOOL_TURNS, "trajectory": "g3/1"}]
    write_step(tmp_path / "run", 3, records)
    rows = export(tmp_path / "run", tmp_path / "rows.jsonl", "--form", form)
    assert len(rows) == 2
    (said,) = [each.getMessage() for each in caplog.records if "--form" in each.getMessage()]
    assert said.startswith(f"--form {form} has no place for what changed or cut the distribution of 1 of 2 rows")
    assert "(logit_bias in 1, min_tokens in 1, top_k, top_p, min_p or a format in 1)" in said
    caplog.clear()
    (row, _) = export(tmp_path / "run", tmp_path / "own.jsonl")
    assert row["is_cut"][0] is True
    export(tmp_path / "run", tmp_path / "again.jsonl", "--form", form, "--steps", "3:4")
    assert len([each for each in caplog.records if "--form" in each.getMessage()]) == 1


@pytest.mark.parametrize("form", ["trl", "verl"])
def test_rows_say_their_temperature_and_a_trainer_of_another_form_is_to_be_given_it(tmp_path, caplog, form):
    (row,) = TOOL_TURNS["rows"]
    temperatures = [1.0, 0.7, 0.7, 0.5]
    records = [
        {**TOOL_TURNS, "trajectory": f"g3/{number}", "rows": [{**row, "temperature": temperature}]}
        for number, temperature in enumerate(temperatures)
    ]
    write_step(tmp_path / "run", 3, records)
    for name in ("rows.jsonl", "rows.parquet"):
        rows = export(tmp_path / "run", tmp_path / name, "--form", form)
        assert [row.get("temperature", row.get("extra_info", {}).get("temperature")) for row in rows] == temperatures
    said = [each.getMessage() for each in caplog.records if "--form" in each.getMessage()]
    told = (
        f"--form {form}: the logprobs of 3 of 4 rows are of a temperature other than 1 (0.7 in 2, 0.5 in 1): give the"
    )
    assert [each.startswith(told) for each in said] == [True, True]


def test_rows_of_the_models_own_distribution_are_exported_in_silence(tmp_path, run, caplog):
    export(run, tmp_path / "rows.jsonl", "--form", "trl")
    assert not [each for each in caplog.records if "--form" in each.getMessage()]


async def test_each_turn_says_which_policy_and_version_answered(tmp_path):
    await write_store(tmp_path / "store")
    rows = export(tmp_path / "store", tmp_path / "rows.parquet")
    assert [row["policies"] for row in rows] == [["tiny", "tiny"], ["tiny", "tiny"], ["tiny"], []]
    turns = StoreRun(str(tmp_path / "store"), name="store").read_trajectory(0, 0)["record"]["turns"]
    assert [(turn["policy"], turn["policy_versions"]) for turn in turns] == [
        ("tiny", [[0, turn["num_sampled"], 0]]) for turn in turns
    ]


def test_a_store_is_exported_from_both_databases(tmp_path, location):  # noqa: F811
    store = open_store(location)
    store.create(make_session(tokenizer="a/tokenizer", model="policy"))
    for number in range(2):
        store.commit([make_commit(number=number, text="half a pair: \ud800")])
    store.finish("s", SessionStatus.FINISHED, {"status": 7, "reward": 0.5})  # no name of a status
    store.close()
    (row,) = export(location, tmp_path / "rows.parquet")
    assert json.loads(row["messages"])[0]["content"] == "half a pair: ?"
    (shown,) = StoreRun(location, name="store").read_step(0)["trajectories"]
    assert [(each["status"], each["reward"]) for each in (row, shown)] == [("finished", 0.5)] * 2
    first, second = make_turn(0), make_turn(1)
    ids = [part.tolist() for turn in (first, second) for part in (turn.given.token_ids, turn.sequence.completion_ids)]
    assert row["token_ids"] == [token for part in ids for token in part]
    known = [each for each in row["rollout_logprobs"] if each is not None]
    assert known == [*first.sequence.rollout_logprobs.tolist(), *second.sequence.rollout_logprobs.tolist()]
    assert row["policy_versions"] == ([None] * 5 + [3] * 2 + [4] * 3) * 2
    assert (row["tokenizer"], row["kind"], row["step"], row["temperature"]) == ("a/tokenizer", "session", None, 0.7)


async def test_images_are_named_in_rows_and_refused_in_forms_that_process_them_anew(tmp_path, capsys):
    await write_image_store(tmp_path / "store")
    write_step(tmp_path / "run", 0, [make_rich()])
    for source in ("store", "run"):
        (row,) = export(tmp_path / source, tmp_path / f"{source}.jsonl")
        assert row["images"][0]["stop"] > row["images"][0]["start"]
        assert main(["export", str(tmp_path / source), str(tmp_path / "x.parquet"), "--form=trl"]) == 1
        assert "--form must be rows for rollouts with images" in capsys.readouterr().err
    assert not list(tmp_path.glob("*x.parquet*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{new}.parquet", "--steps", "3"], "--steps must be A:B, such as 10:20, got '3'"),
        (["{run}", "{new}.parquet", "--steps", "4:9"], "has no rollouts of these steps"),
        (["{run}", "{new}.csv"], "TARGET must be a file .parquet, .jsonl or .eval, or a folder, got"),
        (["{run}", "{new}.parquet", "--kind", "hard"], "SOURCE must be the folder of a run with hard, or the store"),
        (["{new}", "{new}.parquet"], ": there is no such folder"),
        (["{run}", "{run}/rollouts", "--form", "trl"], "TARGET must be new, and"),
        (["{run}", "{run}/rollouts/step-00000003.rank-0.jsonl.gz/x.jsonl"], "x.jsonl cannot be written: "),
        (["{run}", "{new}.eval", "--form", "trl"], "--form must be left out with a target .eval, which is Inspect's"),
        (["{run}", "{new}.parquet", "--merged"], "--merged must be left out for rows, got"),
        (["{run}", "{new}", "--steps", "1:2"], "--steps must be left out for a model: rows need --form or a file"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_sentence_and_nothing_is_left(tmp_path, run, capsys, words, message):
    assert main(["export", *(word.format(run=run, new=tmp_path / "new") for word in words)]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_forked_rollout_has_the_ids_of_each_branch(tmp_path):
    write_step(tmp_path / "run", 0, [make_forked()])
    rows = export(tmp_path / "run", tmp_path / "rows.jsonl", "--form", "trl")
    assert [(row["prompt_ids"], row["completion_ids"]) for row in rows] == [([1, 2], [3, 4]), ([1, 9], [6])]


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "reward is text": ({"reward": "x"}, "rollout 0: reward must be null or a number, got 'x'"),
    "reward is a list": ({"reward": [1]}, r"rollout 0: reward must be null or a number, got [1]"),
    "reward is true": ({"reward": True}, "rollout 0: reward must be null or a number, got True"),
    "part is text": ({"reward_parts": {"a": "x"}}, "reward_parts must be an object of numbers, got {'a': 'x'}"),
    "null turn": ({"turns": [None]}, "rollout 0: turns must be a list of objects, got [None]"),
    "null row": ({"rows": [None]}, "rollout 0: rows must be a list of objects, got [None]"),
    "null message": ({"messages": [None]}, "rollout 0: messages must be a list of objects, got [None]"),
    "no rows": ({"rows": None}, "rollout 0: rows must be a list of objects, got None"),
    "empty row": ({"rows": [{}]}, "must have rollouts as docs/rollouts.md describes them: KeyError"),
    "empty turn": ({"turns": [{}]}, "must have rollouts as docs/rollouts.md describes them: KeyError"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize(
    "words", [("rows.parquet",), ("rows.jsonl",), ("rows.eval",), ("rows.jsonl", "--form", "verl")]
)
def test_records_that_others_wrote_are_refused_by_field_rule_and_value(tmp_path, capsys, case, words):
    changed, message = HOSTILE[case]
    write_step(tmp_path / "run", 3, [{**TOOL_TURNS, **changed}], columns={})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / words[0]), *words[1:]]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_half_a_surrogate_pair_in_a_record_is_written_or_refused_in_a_sentence(tmp_path, capsys):
    """Our own writer replaces it; others may spell it as an escape."""
    write_step(tmp_path / "run", 3, [{**TOOL_TURNS, "trajectory": "SURROGATE"}])
    (path,) = (tmp_path / "run" / "rollouts").iterdir()
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"SURROGATE", rb"\ud800")))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "rows.parquet")]) == 1
    assert "describes them: UnicodeEncodeError" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "rows.jsonl")]) == 0


def write_notes(run: Path) -> None:
    resources = open_runs([run])
    for path, text in (("run/0/step/3/rollout/0/note", "good"), ("run/0/step/3@math/rollout/0/note", "of math")):
        sha256 = resources.get(path.removesuffix("/note"))["sha256"]
        note = {"labels": ["a", "b"], "text": text, "sha256": sha256, "shown_time_s": None}
        resources.write_note(path, json.dumps(note).encode())


@pytest.mark.parametrize("end", ["parquet", "jsonl"])
def test_labels_and_notes_of_the_viewer_are_in_the_rows_of_every_form(tmp_path, capsys, end):
    other = make_trajectory("g4/0", [make_row([1, 2, 3], num_prompt=1)])
    write_step(tmp_path / "run", 3, [TOOL_TURNS, other], num_rollouts=2)
    write_step(tmp_path / "run", 3, [TOOL_TURNS], folder="evaluations/math", set="math")
    write_notes(tmp_path / "run")
    none = {"rollout_labels": [], "rollout_note": None}
    rows = export(tmp_path / "run", tmp_path / f"rows.{end}")
    assert [{name: row[name] for name in none} for row in rows] == [
        {"rollout_labels": ["a", "b"], "rollout_note": "good"},
        none,
    ]
    assert "2 rows of 2 rollouts" in (said := capsys.readouterr().out)
    assert said.endswith(", 1 with a note\n")
    assert export(tmp_path / "run", tmp_path / f"m.{end}", "--kind", "math")[0]["rollout_note"] == "of math"
    assert [row["rollout_note"] for row in export(tmp_path / "run", tmp_path / f"t.{end}", "--form", "trl")] == [
        "good",
        None,
    ]
    verl = export(tmp_path / "run", tmp_path / f"v.{end}", "--form", "verl")
    assert [row["extra_info"]["rollout_labels"] for row in verl] == [["a", "b"], []]


def test_labels_and_notes_are_in_a_log_of_inspect(tmp_path):
    write_step(tmp_path / "run", 3, [TOOL_TURNS])
    write_step(tmp_path / "run", 3, [TOOL_TURNS], folder="evaluations/math", set="math")
    write_notes(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "log.eval")]) == 0
    with zipfile.ZipFile(tmp_path / "log.eval") as log:
        name = next(each for each in log.namelist() if each.startswith("samples/"))
        metadata = json.loads(log.read(name))["metadata"]
    assert metadata["rollout_labels"] == ["a", "b"]
    assert "rollout_note" not in metadata["rows"][0]


def test_a_damaged_note_is_a_warning_and_the_export_has_all_others(tmp_path, capsys):
    write_step(tmp_path / "run", 3, [TOOL_TURNS])
    write_step(tmp_path / "run", 3, [TOOL_TURNS], folder="evaluations/math", set="math")
    write_notes(tmp_path / "run")
    path = tmp_path / "run" / "notes.jsonl"
    later = json.loads(path.read_text().partition("\n")[0]) | {"\x1b[2J" + "x" * 900: 1}
    path.write_text(f"{path.read_text()}{json.dumps(later)}\n{path.read_text()[:40]}")
    assert export(tmp_path / "run", tmp_path / "rows.jsonl")[0]["rollout_note"] == "good"
    said = capsys.readouterr().err
    assert "line 3 of notes.jsonl must be a note, and is left out: \\x1b[2Jxxx" in said
    assert "line 4 of notes.jsonl must be a note" in said
    assert "\x1b" not in said
    assert "x" * 81 not in said


@pytest.mark.parametrize("trajectory", [["a"], {"a": 1}, None, 1])
@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_a_rollout_whose_id_is_no_string_is_refused(tmp_path, capsys, trajectory, end):
    write_step(tmp_path / "run", 3, [TOOL_TURNS])
    write_step(tmp_path / "run", 3, [{**TOOL_TURNS, "trajectory": trajectory}])
    assert main(["export", str(tmp_path / "run"), str(tmp_path / f"rows.{end}")]) == 1
    said = capsys.readouterr().err
    assert f"rollout 0: trajectory must be a string, got {trajectory!r}" in said
    assert "TypeError" not in said
