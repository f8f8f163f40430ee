"""`unbroken train --env verifiers:NAME`: real environments of the package, run by one command on a tiny model.

Each version of verifiers is in an environment of its own (`make clients`), which borrows the other packages from this
one. Of every rollout the recorded ids are compared: what the trainer computed for each sampled id with what it was
sampled with, and that each of them was trained, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.agent_programs import find_python
from support.served import save_tiny_model
from unbroken.runs.records.files import find_records, read_records

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
START = """
import runpy, site, sys
site.addsitedir(sys.argv.pop(1))
sys.argv.pop(0)
if sys.argv[0] == "unbroken":
    from unbroken.cli import main
    sys.exit(main(sys.argv[1:]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COUNT = '{"name": "count", "arguments": {}}'
OPTIONS = (
    "--loop.num-steps=2",
    "--rollouts.problems-per-step=2",
    "--rollouts.group-size=3",
    "--rollouts.sampling.max-tokens=12",
    "--rollout-log.groups=none",
    "--trainer.optimizer.learning-rate=1e-3",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, name: str, venv: str, *options: str) -> list[dict[str, Any]]:
    """Run the command with the Python of `venv`; returns the lines of its metrics."""
    words = ["train", "--env", f"verifiers:{name}", f"--model={model}", f"--output={folder}", *OPTIONS, *options]
    run(folder, venv, "unbroken", *words)
    return [json.loads(line) for line in (folder / "metrics" / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, venv: str, *words: str) -> str:
    """Run the command or a script with the Python of `venv`; returns what it printed."""
    paths = [ROOT / "src", ROOT / "tests", CLIENTS / "environments"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_DATASETS_CACHE": f"{folder}-cache"}
    command = [str(find_python(venv)), "-c", START, sysconfig.get_paths()["purelib"], *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    return done.stdout


def check_exact(folder: Path) -> list[dict[str, Any]]:
    """Compare the ids of all rollouts; returns their records."""
    found = []
    for path in find_records(folder / "rollouts").values():
        found += [line for line in read_records(path) if line["kind"] == "trajectory"]
    assert len(found) == 12
    for record in found:
        num_trained = 0
        for row in record["rows"]:
            ratio = np.array(row["trainer_logprobs"]) - np.array(row["rollout_logprobs"])
            assert np.all(np.expm1(ratio) - ratio <= 1e-10), "k3"
            num_trained += sum(stop - start for start, stop in row["loss"])
        assert num_trained == sum(turn["num_sampled"] for turn in record["turns"]) > 0
    return found


@pytest.mark.parametrize(
    ("kind", "turns", "metric"),
    [
        ("single", 1, "num_letters"),
        ("compared", 1, "longest"),
        ("tool", 1, "look_calls"),
        ("turns", 3, "num_turns"),
        ("stateful", 2, "count_calls"),
        ("reasoning_gym", 1, "format_reward_func"),
        ("harness", 2, "letters"),
    ],
)
def test_i4_an_environment_of_verifiers_0_1_trains_on_exactly_the_sampled_ids(
    tmp_path: Path, model: Path, kind: str, turns: int, metric: str
) -> None:
    arguments = f'--environment-arguments={{kind = "{kind}"}}'
    steps = train(tmp_path / "run", model, "classic_environments", "verifiers-0.1", arguments)
    assert [line["rollout/turns_mean"] for line in steps] == [turns] * 2
    assert all(f"reward/{metric}_mean" in line and line["mismatch/k3"] <= 1e-10 for line in steps)
    assert {record["status"] for record in check_exact(tmp_path / "run")} == {"completed"}


@pytest.mark.parametrize(
    ("kind", "call", "result"), [("tool", '{"name": "look", "arguments": {"cell": 4}}', "17"), ("stateful", COUNT, "1")]
)
def test_i1_tools_of_an_environment_of_verifiers_0_1_are_called_within_one_row(
    tmp_path: Path, kind: str, call: str, result: str
) -> None:
    call = f"<tool_call>\n{call}\n</tool_call><|im_end|>"
    script = str(CLIENTS / "verifiers_calls.py")
    printed = run(tmp_path, "verifiers-0.1", script, kind, call, "It is 17.<|im_end|>", str(tmp_path))
    found = json.loads(printed.splitlines()[-1])
    assert found["error"] == "None"
    assert [role for role, _ in found["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert found["messages"][2][1] == result
    assert found["metrics"]["total_tool_calls"] == 1
    assert found["is_exact"]


def test_i4_a_taskset_of_verifiers_0_4_with_its_own_harness_trains_on_exactly_the_sampled_ids(
    tmp_path: Path, model: Path
) -> None:
    agent = '--environment-arguments={agent = {runtime = {type = "subprocess"}}}'
    steps = train(tmp_path / "run", model, "cells-v1", "verifiers-0.4", agent)
    assert [line["rollout/turns_mean"] for line in steps] == [2, 2]
    assert all("reward/letters_mean" in line and line["mismatch/k3"] <= 1e-10 for line in steps)
    assert {record["status"] for record in check_exact(tmp_path / "run")} == {"completed"}
