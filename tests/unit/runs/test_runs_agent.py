"""`unbroken agent NAME TASK`: one rollout of a known agent, its reward, and what is proven of its row."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from support.known_agents import install_codex, install_engine
from support.served import save_tiny_model, served
from unbroken.cli import main
from unbroken.runs.agent import count_proven, describe_rollout
from unbroken.runs.collector import DEFAULT_SET
from unbroken.runs.evaluation.evaluator import FOLDER
from unbroken.runs.records.files import find_records, read_records

SHORT = ("--rollouts.sampling.max-tokens", "6")
HAS_SAID = f"{sys.executable} -c \"import os; assert sorted(os.listdir()) == ['notes.txt', 'said.txt']\""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    install_codex(tmp_path / "bin", monkeypatch)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("as it was")
    return folder


def run(output: Path, workspace: Path, *words: str, task: tuple[str, ...] = ("Say", "it.")) -> int:
    own = ["--output", str(output), "--workspace", str(workspace)]
    return main(["agent", "codex", *task, *own, *words, *SHORT])


def test_one_command_runs_an_agent_on_a_task_and_proves_its_row(
    tmp_path: Path, model: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = workspace / "out"  # inside of the workspace, as `--workspace .` has it
    assert run(output, workspace, "--model", str(model), "--check", HAS_SAID) == 0
    printed = capsys.readouterr().out
    (path,) = find_records(output / FOLDER / DEFAULT_SET).values()
    _, record = read_records(path)
    (row,) = record["rows"]
    assert record["messages"][0]["content"] == "Say it."
    assert (record["reward"], record["reward_parts"]) == (1.0, {"agent_failed": 0.0})
    num_sampled = record["turns"][0]["num_sampled"]
    assert count_proven(row) == num_sampled == len(row["rollout_logprobs"]) > 0
    assert printed.startswith("reward 1: the check passed\n")
    assert f"{num_sampled} of {num_sampled} ids that" in printed
    assert str(path) in printed
    assert sorted(each.name for each in workspace.iterdir()) == ["notes.txt", "out"]
    assert main(["export", str(output), str(tmp_path / "rows.jsonl"), "--kind", "evaluation"]) == 0
    exported = json.loads((tmp_path / "rows.jsonl").read_text())
    assert exported["token_ids"] == row["token_ids"]


def test_the_same_command_ends_at_once_with_what_it_has_and_another_task_is_refused(
    tmp_path: Path, model: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--check", "false"]
    assert run(tmp_path / "out", workspace, *words) == 0
    first = capsys.readouterr().out
    assert first.startswith("reward 0: the check failed\n")
    assert run(tmp_path / "out", workspace, *words) == 0
    assert capsys.readouterr().out == first
    assert len(list((tmp_path / "out" / "agents").glob("*.check.log"))) == 1
    assert run(tmp_path / "out", workspace, *words, task=("Another.",)) == 1
    assert "--output must be a new or empty folder, or that of the same task" in capsys.readouterr().err


def test_an_image_has_the_agent_and_the_check(
    tmp_path: Path, model: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = install_engine(tmp_path / "bin", "docker", monkeypatch)
    words = ["--model", str(model), "--check", HAS_SAID]
    assert run(tmp_path / "out", workspace, *words, "--image", "other") == 1
    assert "agent.image must be an image that is on this machine, got 'other'" in capsys.readouterr().err
    assert run(tmp_path / "out", workspace, *words, "--image", "box") == 0
    assert capsys.readouterr().out.startswith("reward 1: the check passed\n")
    assert [json.loads(line)[0] for line in log.read_text().splitlines()].count("run") == 2


def test_a_server_is_asked_by_its_url(
    tmp_path: Path, model: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(model, engine="transformers") as server:
        assert (
            run(tmp_path / "out", workspace, "--url", server.url, "--tokenizer", str(model), "--check", HAS_SAID) == 0
        )
    assert capsys.readouterr().out.startswith("reward 1: the check passed\n")


def test_a_run_trains_on_what_a_known_agent_did(tmp_path: Path, model: Path, workspace: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say it."}\n' * 2)
    check = json.dumps([sys.executable, "-c", "import sys; sys.exit('a' not in open('said.txt').read())"])
    (tmp_path / "recipe.toml").write_text(
        f'model = "{model}"\ndata.file = "rows.jsonl"\nagent.name = "codex"\nagent.workspace = "project"\n'
        f"agent.check = {check}\nloop.num_steps = 1\nrollouts.problems_per_step = 2\nrollouts.group_size = 4\n"
    )
    output = tmp_path / "run"
    assert main(["train", str(tmp_path / "recipe.toml"), "--output", str(output), *SHORT]) == 0
    (path,) = find_records(output / "rollouts").values()
    _, *records = read_records(path)
    assert len(records) == 8
    for record in records:
        said = record["messages"][-1]["content"]
        assert (record["status"], record["reward"]) == ("completed", float("a" in said))
        assert sum(map(count_proven, record["rows"])) == record["turns"][0]["num_sampled"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--check", "no-such-program -q"), "agent.check must begin with a program, got 'no-such-program'"),
        (("--check", "'"), '--check must be a command, got "\'"'),
        (("--check", ""), "--check must be a command, got ''"),
    ],
)
def test_a_check_that_cannot_be_started_is_named_before_a_model_is_loaded(
    tmp_path: Path, model: Path, workspace: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], error: str
) -> None:
    assert run(tmp_path / "out", workspace, "--model", str(model), *words) == 1
    assert error in capsys.readouterr().err


def test_an_agent_that_never_asks_ends_the_command_with_its_words(
    tmp_path: Path, model: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--check", "true"]
    assert run(tmp_path / "out", workspace, *words, task=("Fail.",)) == 1
    assert "codex exited with 1: codex: no such model" in capsys.readouterr().err


def test_an_agent_that_is_not_known_or_not_installed_is_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["agent", "codx", "Say it.", "--model", str(model), "--check", "true"])
    assert "codex" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert (
        main(["agent", "codex", "Say it.", "--model", str(model), "--check", "true", "--output", str(tmp_path / "o")])
        == 1
    )
    assert "there is no program codex on PATH. Install it: npm install -g @openai/codex" in capsys.readouterr().err


ROW: dict[str, Any] = {
    "segments": [
        {"start": 0, "stop": 2, "origin": "prompt"},
        {"start": 2, "stop": 4, "origin": "sampled"},
        {"start": 4, "stop": 5, "origin": "bridge"},
        {"start": 5, "stop": 6, "origin": "sampled"},
    ],
    "rollout_logprobs": [-0.125, -0.25, -0.375],
    "policy_versions": [[2, 4, 7], [5, 6, 7]],
    "loss": [[2, 4], [5, 6]],
}


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 3),
        ({"loss": [[5, 6]]}, 1),  # a branch whose beginning is in the loss of another
        ({"rollout_logprobs": [-0.125, -0.25]}, 0),
        ({"policy_versions": [[2, 4, 7]]}, 0),
        ({"loss": [[2, 5]]}, 0),  # a given id
    ],
)
def test_what_is_proven_is_counted_in_the_row(change: dict[str, Any], number: int) -> None:
    assert count_proven({**ROW, **change}) == number


def test_a_rollout_that_is_not_all_proven_or_was_ended_says_so() -> None:
    record = {
        "reward": 0.0, "status": "timeout", "reward_parts": {}, "counters": {"bridges/derived": 1},
        "turns": [{"num_sampled": 3, "fork": None}, {"num_sampled": 2, "fork": "edited_reply"}], "rows": [ROW],
    }  # fmt: skip
    text = describe_rollout((Path("f"), record), Path("o"), model="m")
    assert text.startswith("reward 0: the agent did not end by itself (timeout), so nothing was checked\n")
    assert "3 of 5 ids that m sampled are in a row" in text
    assert re.search("1 turns continue the ids of the turn before; forks: edited_reply", text)
