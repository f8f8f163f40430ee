"""No part of a command is silent for long, and its end says what to type next."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import threading
from pathlib import Path

import pytest

import unbroken
from support.forks import ForkedPython
from support.served import save_tiny_model
from support.waits import wait_until
from unbroken import progress
from unbroken.cli import main

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class Lines(io.StringIO):
    """An output that can be waited for."""

    def wait(self, word: str) -> None:
        asyncio.run(wait_until(lambda: word in self.getvalue()))


def test_each_part_of_a_run_says_how_far_it_is_and_the_end_names_the_viewer(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    parts = iter(["preflight", "evaluation", "step 0: sampling", "evaluation"])
    calls = iter([part for part in parts for _ in range(2)])  # each part has two groups
    lock, shown = threading.Lock(), Lines()
    monkeypatch.setattr("sys.stderr", shown)

    def score(completions):
        with lock:
            part = next(calls)
        shown.wait(f"\n{part}: ")
        return [float(len(text) % 3) for text in completions]

    unbroken.fit(
        model,
        [{"prompt": f"What is {k}?"} for k in range(8)],
        score,
        steps=1,
        output=tmp_path / "my run",
        rollouts={"problems_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 4}},
        evaluation={"num_problems": 2},
    )
    assert list(calls) == []
    assert "preflight: 0 of 8 rollouts in 0:00:00" in shown.getvalue()
    assert f"\nlook at it: unbroken view '{tmp_path / 'my run'}'\n" in capsys.readouterr().out


TASK = """
model = "{model}"
data.file = "prompts.jsonl"
rollouts.sampling.max_tokens = 4
rollouts.problems_per_step = 2
rollouts.group_size = 2
loop.num_steps = 3
checkpoints.every = {every}
evaluation.num_problems = 0
trackers.names = []
rewards = [{{function = "rewards.py:score"}}]
"""
WAITS = """
import time
from pathlib import Path

def score(completions):
    while Path(__file__).with_name("steps").exists() and {condition}:
        Path(__file__).with_name("waits").touch()
        time.sleep(0.01)
    return [float(len(text) % 3) for text in completions]
"""


@pytest.mark.parametrize(
    ("condition", "every", "words"),
    [
        ("True", 1, "terminated; there is no checkpoint yet, so the same command begins anew"),
        (
            "list(Path(__file__).with_name('run').glob('checkpoints/step-*'))",
            1,
            "terminated; the same command continues from the last checkpoint",
        ),
    ],
)
def test_a_run_that_is_ended_promises_a_checkpoint_only_if_there_is_one(tmp_path, model, condition, every, words):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{k}?"}) + "\n" for k in range(8)))
    (tmp_path / "rewards.py").write_text(WAITS.format(condition=condition))
    (tmp_path / "steps").touch()
    (tmp_path / "task.toml").write_text(TASK.format(model=model, every=every))
    given = ["train", tmp_path / "task.toml", f"--output={tmp_path / 'run'}", "--preflight=false"]
    process = ForkedPython("unbroken", *given, output=tmp_path / "log")
    asyncio.run(wait_until(lambda: (tmp_path / "waits").exists() or process.poll() is not None))
    process.send_signal(signal.SIGTERM)
    (tmp_path / "steps").unlink()
    assert process.wait(timeout=60) == 143, (tmp_path / "log").read_text()
    assert words in (tmp_path / "log").read_text()


def test_an_evaluation_says_how_far_retokenising_and_scoring_are(tmp_path, model, monkeypatch, capsys):
    counted: list[str] = []
    monkeypatch.setattr("unbroken.retokenising.records.advance", lambda: counted.append("rollout"))
    monkeypatch.setattr("unbroken.retokenising.ratios.advance", lambda: counted.append("sequence"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{k}?"}) + "\n" for k in range(3)))
    (tmp_path / "rewards.py").write_text("def score(completions):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "task.toml").write_text(TASK.format(model=model, every=1))
    words = ["eval", str(tmp_path / "task.toml"), "--problems=3", f"--output={tmp_path / 'run'}", "--retokenised"]
    assert main(words) == 0
    assert counted.count("rollout") == 3
    assert counted.count("sequence") >= 3
    assert f"look at it: unbroken view {tmp_path / 'run'}" in capsys.readouterr().err
