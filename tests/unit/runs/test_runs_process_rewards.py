"""Rewards of spans and of parts in whole runs: their advantages, a run that continues, and its proof."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.served import save_tiny_model
from unbroken.cli import main

REWARDS = """
def steps(completion_ids):
    \"\"\"A reward for each span of two ids; the last id of an odd number has none.\"\"\"
    return [[(k, k + 2, float(ids[k] % 3)) for k in range(0, len(ids) - 1, 2)] or 0.0 for ids in completion_ids]


def length(completion_ids):
    return [len(ids) / 8 if len(ids) % 2 else None for ids in completion_ids]


def same(completions):
    return [1.0] * len(completions)
"""
TASK = """
model = "{model}"
data.file = "prompts.jsonl"
rollouts = {{ problems_per_step = 2, group_size = 4, sampling = {{ max_tokens = 7 }}, limits = {{ max_turns = 1 }} }}
trainer = {{ numerics = "exact", num_minibatches = 2, optimizer = {{ learning_rate = 3e-3 }} }}
loop.num_steps = 3
checkpoints = {{ every = 2, num_kept = 9 }}
evaluation.num_problems = 0
[[rewards]]
function = "rewards.py:steps"
weight = 0.3
[[rewards]]
function = "rewards.py:length"
weight = -0.7
[[rewards]]
function = "rewards.py:same"
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Write {k}."}) + "\n" for k in range(6)))
    (folder / "task.toml").write_text(TASK.format(model=save_tiny_model(tmp_path_factory.mktemp("model"))))
    return folder / "task.toml"


def train(task: Path, output: Path, *options: str) -> None:
    assert main(["train", str(task), f"--output={output}", "--preflight=false", *options]) == 0


def read_records(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [line for line in lines if line["kind"] == "trajectory"]


@pytest.mark.parametrize("advantages", ["turn_grpo", "gdpo"])
def test_a_run_continues_to_the_bit_and_is_verified(task, tmp_path, capsys, advantages):
    option = f"--advantages={advantages}"
    train(task, tmp_path / "whole", option)
    train(task, tmp_path / "halves", option, "--loop.num-steps=2")
    train(task, tmp_path / "halves", option)
    assert main(["verify", str(tmp_path / "whole"), "--against", str(tmp_path / "halves")]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "halves")]) == 0
    assert "verified (3 of 3 steps" in capsys.readouterr().out
    path = tmp_path / "whole" / "rollouts" / "step-00000002.rank-0.jsonl.gz"
    records = read_records(path)
    numbers = [len({value for _, _, value in record["rows"][0]["advantages"]}) for record in records]
    assert (max(numbers) > 2) == (advantages == "turn_grpo")
    assert records[0]["reward_weights"] == {"steps": 0.3, "length": -0.7, "same": 1.0}
    change = "span_rewards" if advantages == "turn_grpo" else "reward_parts"
    changed = json.loads(gzip.decompress(path.read_bytes()).splitlines()[2])
    if change == "span_rewards":
        changed[change][0][2] += 1.0
    else:
        changed[change]["steps"] += 1.0
    lines = gzip.decompress(path.read_bytes()).splitlines()
    lines[2] = json.dumps(changed).encode()
    path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    assert main(["verify", str(tmp_path / "whole")]) != 0
    assert "step 2: step-00000002.rank-0.jsonl.gz: trajectory" in capsys.readouterr().out
