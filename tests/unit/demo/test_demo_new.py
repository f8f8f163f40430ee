"""`unbroken new`: the files of a task that run as they are, and are those of the docs."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.demo.model import build_tokenizer
from unbroken.demo.new import write_task
from unbroken.runs.recipe import load_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.usefixtures("datasets_cache")
def test_a_task_for_a_model_is_written_its_reward_is_tested_and_a_step_is_trained(tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "words", "--model", str(model)]) == 0
    assert "next: cd words && unbroken train task.toml" in capsys.readouterr().out
    for line in (tmp_path / "words" / "prompts.jsonl").read_text().splitlines():
        assert "Call the tool lookup" in json.loads(line)["prompt"]
    tested = subprocess.run(
        [sys.executable, "test_rewards.py"], cwd=tmp_path / "words", capture_output=True, text=True, check=False
    )
    assert (tested.returncode, tested.stderr) == (0, "")
    short = ["--loop.num-steps=1", "--rollouts.problems-per-step=2", "--rollouts.group-size=2"]
    short += ["--evaluation.num-problems=0", "--rollouts.sampling.max-tokens=8"]
    assert main(["train", "words/task.toml", *short]) == 0
    shown = capsys.readouterr().out
    assert "tools   lookup: the prompt shows them" in shown
    assert (tmp_path / "words" / "runs" / "first" / "final" / "config.json").is_file()


@pytest.mark.usefixtures("datasets_cache")
def test_without_a_model_a_tiny_one_is_copied_that_knows_the_task(tmp_path, capsys):
    assert main(["new", str(tmp_path / "words")]) == 0
    files = re.search(r"words: (.*)", capsys.readouterr().out)
    assert files is not None
    assert sorted(files[1].split(", ")) == sorted(each.name for each in (tmp_path / "words").iterdir())
    assert main(["doctor", str(tmp_path / "words" / "task.toml")]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'words' / 'model'}, 0.11 M parameters" in shown
    assert re.search(r"the prompt shows them; \d+ calls\n  turns   (\d+) of \1 end by themselves\n", shown)
    # Of the demo: what the model was warmed up with is what the demo's tests look at.
    tokenizer = json.loads((tmp_path / "words" / "model" / "tokenizer.json").read_text())
    assert tokenizer == json.loads(build_tokenizer().backend_tokenizer.to_str())


def test_the_test_of_the_rewards_names_those_that_are_tested(tmp_path, model):
    write_task(tmp_path / "words", str(model))

    def check() -> str:
        command = [sys.executable, "-B", "test_rewards.py"]
        return subprocess.run(command, cwd=tmp_path / "words", capture_output=True, text=True, check=True).stdout

    assert check().splitlines() == ["correct: as its test says", "one_lookup: as its test says"]
    path = tmp_path / "words" / "rewards.py"
    path.write_text(path.read_text().replace("def one_lookup", "def two_lookups"))
    assert check().splitlines() == ["correct: as its test says", "two_lookups: NOT TESTED"]


def test_the_program_that_writes_the_data_writes_what_is_there(tmp_path, model):
    for name, source in (("tiny", None), ("large", str(model))):
        write_task(tmp_path / name, source)
        before = {each.name: each.read_bytes() for each in (tmp_path / name).iterdir() if each.is_file()}
        subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path / name, check=True)
        assert {each.name: each.read_bytes() for each in (tmp_path / name).iterdir() if each.is_file()} == before


def test_the_three_edits_that_are_marked_make_the_task_that_the_readme_describes(tmp_path):
    write_task(task := tmp_path / "words")
    edits = {
        "make_data.py": [('"answer": value})  # EDIT 1', '"answer": second})')],
        "task.toml": [('"runs/first"  # EDIT 3: another folder', '"runs/second"'), ("\n#[[", "\n[[")]
        + [(f"#{name}", name) for name in ("function", "weight")],
    }
    for name, changes in edits.items():
        text = (task / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (task / name).write_text(text)
    assert (task / "rewards.py").read_text().count("EDIT 2") == 1
    subprocess.run([sys.executable, "make_data.py"], cwd=task, check=True)
    table = json.loads((task / "table.json").read_text())
    for row in map(json.loads, (task / "prompts.jsonl").read_text().splitlines()):
        assert table[row["prompt"].split('"')[1]] == {"next": row["answer"]}
    rewards = load_recipe(task / "task.toml").configure(()).rewards
    weights = {each.function.name: each.weight for each in rewards}
    assert weights == {"rewards.py:correct": 1.0, "rewards.py:one_lookup": 0.5}


def test_git_leaves_out_the_runs_of_a_new_folder_and_nothing_that_it_needs(tmp_path):
    write_task(task := tmp_path / "words")
    (task / "runs" / "first").mkdir(parents=True)
    (task / "runs" / "first" / "log").write_text("")
    subprocess.run(["git", "init", "--quiet"], cwd=task, check=True)
    shown = subprocess.run(
        ["git", "status", "--short", "-uall"], cwd=task, capture_output=True, text=True, check=True
    ).stdout
    assert "model/model.safetensors" in shown
    assert "runs/" not in shown


def test_the_files_are_those_of_getting_started(tmp_path, model):
    write_task(tmp_path / "words", str(model))
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs" / "getting-started.md").read_text(), re.DOTALL)
    write_task(tmp_path / "tiny")
    assert (tmp_path / "tiny" / "make_data.py").read_text() in blocks
    assert (tmp_path / "tiny" / "train.py").read_text() in blocks
    for name in ("tools.py", "rewards.py"):
        assert (tmp_path / "words" / name).read_text() in blocks
    (shown,) = (tomllib.loads(block) for block in blocks if block.startswith("model = "))
    written = tomllib.loads((tmp_path / "words" / "task.toml").read_text())
    for table in (shown, written):
        del table["model"], table["trainer"], table["rollouts"]
    assert written == shown


def test_the_way_from_the_readme_to_an_own_task_is_short_enough_to_be_read_and_typed_in_ten_minutes(capsys):
    tool = runpy.run_path(str(ROOT / "tools" / "measure_reading.py"))
    assert tool["main"]() == 0, capsys.readouterr().out
    assert len(tool["list_sections"]()) > 8, "the README, the new folder's, and its files"


def test_a_folder_that_is_there_and_a_model_that_is_none_are_refused(tmp_path, capsys):
    (tmp_path / "words").mkdir()
    assert main(["new", str(tmp_path / "words")]) == 1
    assert f"NAME must be a folder that is not there yet, got {tmp_path / 'words'}" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "other"), "--model", str(tmp_path / "modl")]) == 1
    assert "--model must be a folder or the hub's name of a model" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["words"]
