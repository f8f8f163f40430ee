"""A TOML file that names an environment: with problems of its own, and with rows and reward functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.served import save_tiny_model
from unbroken.cli import main

FILE = '''
from unbroken import Continue, Done, ToolEnv

class Echo(ToolEnv):
    """Answers each reply until the last turn; the reward is the share of letters."""

    def __init__(self, number, split, *, num_turns: int = 2, answer=0):
        super().__init__([{"role": "user", "content": f"{split} {number} {answer}"}], [], self.score)
        self.left = num_turns

    async def step(self, reply):
        self.left -= 1
        return Continue(messages=[{"role": "user", "content": "Go on."}]) if self.left else Done()

    async def score(self, messages):
        text = messages[-1]["content"] or " "
        return sum(map(str.isalpha, text)) / len(text)

def bonus(completions, answer):
    return [float(right) for right in answer]
'''
RECIPE = """
environment = "envs.py:Echo"
environment_arguments.num_turns = 3
loop.num_steps = 2
rollouts = { problems_per_step = 2, group_size = 4, sampling.max_tokens = 6 }
evaluation.num_problems = 2
"""


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, more: str = "") -> list[dict[str, Any]]:
    (folder / "envs.py").write_text(FILE)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "x", "answer": k}) + "\n" for k in (5, 7)))
    (folder / "recipe.toml").write_text(RECIPE + more)
    assert main(["train", str(folder / "recipe.toml"), f"--output={folder / 'run'}", f"--model={model}"]) == 0
    return [json.loads(line) for line in (folder / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]


def test_an_environment_with_problems_of_its_own(tmp_path, model):
    for line in train(tmp_path, model):
        assert line["rollout/turns_mean"] == 3
        assert 0 < line["reward/mean"] < 1
        assert line["mismatch/max_abs"] < 1e-4


def test_a_run_in_which_all_rollouts_time_out_says_so_and_stops(tmp_path, model, capsys):
    hangs = "import asyncio\nclass Hangs(Echo):\n    async def step(self, reply):\n        await asyncio.sleep(60)\n"
    (tmp_path / "envs.py").write_text(FILE + hangs)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(":Echo", ":Hangs"))
    words = ["train", str(tmp_path / "recipe.toml"), f"--output={tmp_path / 'run'}", f"--model={model}"]
    assert main([*words, "--loop.num-steps=4", "--rollouts.limits.timeout-s=0.1"]) == 1
    printed = capsys.readouterr()
    assert "step 0 (1 of 4)  reward 0  s " in printed.out
    assert printed.out.count("time-outs 8") == 3
    assert "2 of 2 groups have equal rewards (the mean is 0); 8 of 8 rollouts timed out." in printed.err
    assert not (tmp_path / "run" / "final").exists()


def test_an_environment_of_rows_whose_reward_functions_are_added_to_its_own(tmp_path, model):
    more = 'data.file = "prompts.jsonl"\n[[rewards]]\nfunction = "envs.py:bonus"\n'
    for line in train(tmp_path, model, more):
        assert line["reward/bonus_mean"] == 6
        assert 0 < line["reward/environment_mean"] < 1
        assert line["reward/mean"] == pytest.approx(line["reward/environment_mean"] + 6)
