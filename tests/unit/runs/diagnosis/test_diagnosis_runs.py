"""Tiny runs with one mistake each: the run says so once, and `unbroken doctor` finds it in the folder."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from support.forks import ForkedPython
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.demo import new
from unbroken.runs import process_file
from unbroken.runs.diagnosis.diary import diagnose_folder
from unbroken.runs.diagnosis.evidence import read_ending, read_evidence
from unbroken.runs.process_file import record_process
from unbroken.runs.signals import Terminated

pytestmark = pytest.mark.usefixtures("datasets_cache")
TASK = """
model = "{model}"
data.file = "prompts.jsonl"
rollouts.sampling.max_tokens = 8
rollouts.limits.max_turns = 2
rollouts.problems_per_step = 4
rollouts.group_size = 4
trainer.optimizer.learning_rate = 1e-3
loop.num_steps = {steps}
evaluation.num_problems = 0
trackers.names = []
rewards = [{{function = "rewards.py:score"}}]
"""
LENGTHS = "[float(len(text) % 3) for text in completions]"
BROKEN = {
    "equal-rewards": ("[float(a == 'no' + text) for a, text in zip(answer, completions)]", {}),
    "cut": (LENGTHS, {"steps": 5}),
    "reward-range": ("[1e6 * (len(text) % 3) for text in completions]", {"steps": 1}),
    "no-variance": ("[float(int(a) % 2) for a in answer]", {}),
    "unscored": ("[None if int(answer[0]) % 8 else 1.0 for _ in completions]", {"steps": 2}),
    "no-learning-rate": (
        LENGTHS,
        {"more": 'trainer.optimizer.schedule = "linear"\ntrainer.optimizer.decay_updates = 1'},
    ),
    "error": ("[0.0 / len(text.split('never')[1:]) for text in completions]", {}),
}
"""The reward and the settings of a run by the rule that is to find it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def write_task(folder: Path, model: Path, reward: str, *, steps: int = 4, more: str = "") -> Path:
    rows = [{"prompt": f"What is {k} + {k + 1}?", "answer": str(2 * k + 1 + k % 2)} for k in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(f"import os\ndef score(completions, answer):\n    return {reward}\n")
    task = folder / "task.toml"
    task.write_text(more + TASK.format(model=model, steps=steps))
    return task


def names(folder: Path) -> list[str]:
    return [each.name for each in diagnose_folder(folder)[1]]


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_is_found_in_a_run_with_one_mistake(tmp_path, model, capsys, name):
    reward, options = BROKEN[name]
    task = write_task(tmp_path, model, reward, **options)
    main(["train", str(task), f"--output={tmp_path / 'run'}", "--preflight=false"])
    printed = capsys.readouterr().out
    assert name in names(tmp_path / "run")
    assert main(["doctor", str(tmp_path / "run")]) == 0
    assert f"docs/troubleshooting.md#{name}" in capsys.readouterr().out
    assert printed.count(f"docs/troubleshooting.md#{name}") == (name != "error"), "errors have a line of their own"


def test_equal_rollouts_of_a_low_temperature_are_found_in_the_preflight_and_in_the_run(tmp_path, capsys):
    new.write_task(tmp_path / "words")
    short = ["--loop.num-steps=1", "--evaluation.num-problems=0", "--rollouts.problems-per-step=4"]
    temperature = ["--rollouts.sampling.temperature=0.01", "--rollouts.group-size=4"]
    main(["train", str(tmp_path / "words" / "task.toml"), *short, *temperature, f"--output={tmp_path / 'run'}"])
    printed = capsys.readouterr().out
    for word, number in (("preflight", 2), ("diagnosis", 4)):
        assert re.search(rf"{word}: all rollouts of a group are identical \(.* of {number} groups\)", printed)
    assert "and the temperature is 0.01: of equal rollouts nothing can be learned" in printed
    assert "low-temperature" in names(tmp_path / "run")


def test_a_run_that_is_killed_is_known_to_be_dead_and_how_many_steps_it_made(tmp_path, model):
    kills = "[float(len(text) % 3) for text in completions] if '9' not in answer[0] else os.kill(os.getpid(), 9)"
    task = write_task(tmp_path, model, kills, steps=20)
    words = ["train", task, f"--output={tmp_path / 'run'}", "--preflight=false"]
    process = ForkedPython("unbroken", *words, output=tmp_path / "log")
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert json.loads((tmp_path / "run" / "process.json").read_text())["status"] == "running"
    assert "died" in names(tmp_path / "run")


def test_a_run_that_continues_says_nothing_again(tmp_path, model, capsys):
    task = write_task(tmp_path, model, BROKEN["reward-range"][0], steps=2)
    for steps, times in ((1, 1), (2, 0)):
        options = [f"--output={tmp_path / 'run'}", f"--loop.num-steps={steps}", "--preflight=false"]
        assert main(["train", str(task), *options]) == 0
        assert capsys.readouterr().out.count("diagnosis: rewards are from") == times
    kept = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert kept["said"]["reward-range"] == "after 1 step: rewards are from 0 to 2e+06 in the last step"
    assert kept["findings"] == [asdict(each) for each in diagnose_folder(tmp_path / "run")[1]]


@pytest.mark.parametrize(
    ("settings", "gets_harder"),
    [
        ({}, False),
        ({"curriculum": None}, False),
        ({"curriculum": "solved"}, True),
        ({"policies.names": ["first", "second"]}, True),
    ],
)
def test_the_settings_say_whether_a_better_policy_has_it_harder(tmp_path, settings, gets_harder):
    (tmp_path / "recipe.json").write_text(json.dumps({"settings": settings}))
    assert read_evidence(tmp_path).gets_harder is gets_harder


def test_an_evaluation_is_diagnosed_by_its_rollouts(tmp_path, model, capsys):
    task = write_task(tmp_path, model, BROKEN["equal-rewards"][0])
    assert main(["eval", str(task), "--problems", "8", f"--output={tmp_path / 'run'}", "--preflight=false"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(tmp_path / "run")]
    assert "equal-rewards" in [each["name"] for each in found]
    assert read_evidence(tmp_path / "run").is_evaluation


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (ValueError("x"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (Terminated(), "terminated"),
    ],
)
def test_the_folder_says_how_a_process_ended(tmp_path, error, status):
    ends = nullcontext() if error is None else pytest.raises(type(error))
    with ends, record_process(tmp_path):
        assert read_ending(tmp_path).status == "running"
        if error is not None:
            raise error
    assert read_ending(tmp_path).status == status
    assert ("ValueError: x" in read_ending(tmp_path).error) == (status == "failed")


def test_kills_for_memory_count_from_when_the_process_began_and_not_over_a_restart(tmp_path, monkeypatch):
    began = {"status": "running", "process": find_free_process(), "host": os.uname().nodename, "memory_kills": 3}
    monkeypatch.setattr("unbroken.runs.diagnosis.evidence.count_memory_kills", lambda: 5)
    for boot, number in ((process_file.read_boot(), 2), ("another", 0)):
        (tmp_path / "process.json").write_text(json.dumps({**began, "boot": boot}))
        assert (read_ending(tmp_path).status, read_ending(tmp_path).num_memory_kills) == ("died", number)


def find_free_process() -> int:
    """A process id that no process has: that of one that has ended, and was waited for."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("text", ["", "[]", "{", '{"status": 3, "process": "x"}', "\x00" * 10])
def test_damaged_files_are_left_out(tmp_path, text):
    for name in ("process.json", "diagnosis.json", "recipe.json"):
        (tmp_path / name).write_text(text)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.jsonl").write_text(f'{text}\n{{"step": 0, "reward/max": "high"}}\n')
    assert diagnose_folder(tmp_path)[0].num_steps == 1


def test_a_folder_that_holds_no_run_is_refused(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 1
    assert "RUN must be the output folder of a run or an evaluation" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err.endswith("/new: there is no such folder\n")
