"""`unbroken train --env verifiers:NAME`: real environments of the package, run by one command on a tiny model.

Each version of verifiers is in an environment of its own (`make clients`), which borrows the other packages from this
one. Of every rollout the recorded ids are compared: what the trainer computed for each sampled id with what it was
sampled with, and that each of them was trained, once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.client_runs import CLIENTS, ROOT, run_with_client
from support.exact_runs import RECORD_ALL, check_exact, read_metrics
from support.nemo_gym_server import make_example, save_examples
from support.served import save_tiny_model
from support.server_processes import serve_script

pytestmark = pytest.mark.clients

COUNT = '{"name": "count", "arguments": {}}'
OPTIONS = (
    "--loop.num-steps=2",
    "--rollouts.problems-per-step=2",
    "--rollouts.group-size=3",
    "--rollouts.sampling.max-tokens=12",
    "--trainer.optimizer.learning-rate=1e-3",
    "--trainer.kl-weight=0.01",  # so that groups of equal rewards are trained on, too
    *RECORD_ALL,
)
HOST = 'runtime = {type = "subprocess"}'
NULL = f'agent = {{harness = {{id = "null"}}, {HOST}}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, name: str, venv: str, arguments: str = "") -> list[dict[str, Any]]:
    """Run the command, and compare the ids of all rollouts; returns the metrics of its steps."""
    words = ["train", "--env", f"verifiers:{name}", f"--model={model}", f"--output={folder}", *OPTIONS]
    run_with_client(folder, venv, "unbroken", *words, f"--environment-arguments={{{arguments}}}")
    records = check_exact(folder, num_rollouts=12)
    assert {record["status"] for record in records} == {"completed"}
    return read_metrics(folder)


@pytest.mark.parametrize(
    ("kind", "turns", "metric"),
    [
        ("single", 1, "num_letters"),
        ("compared", 1, "longest"),
        ("tool", 1, "look_calls"),
        ("turns", 3, "num_turns"),
        ("stateful", 2, "count_calls"),
        ("harness", 2, "letters"),
    ],
)
def test_i4_an_environment_of_verifiers_0_1_trains_on_exactly_the_sampled_ids(
    tmp_path: Path, model: Path, kind: str, turns: int, metric: str
) -> None:
    steps = train(tmp_path / "run", model, "classic_environments", "verifiers-0.1", f'kind = "{kind}"')
    assert [line["rollout/turns_mean"] for line in steps] == [turns] * 2
    assert all(f"reward/{metric}_mean" in line for line in steps)


def test_i4_an_environment_of_the_package_trains_from_one_command(tmp_path: Path, model: Path) -> None:
    arguments = 'gym = "basic_arithmetic", num_train_examples = 8, num_eval_examples = 2'
    steps = train(tmp_path / "run", model, "ReasoningGymEnv", "verifiers-0.1", arguments)
    assert all("reward/check_answer_reward_func_mean" in line for line in steps)


@pytest.mark.parametrize(
    ("kind", "call", "result"), [("tool", '{"name": "look", "arguments": {"cell": 4}}', "17"), ("stateful", COUNT, "1")]
)
def test_i1_tools_of_an_environment_of_verifiers_0_1_are_called_within_one_row(
    tmp_path: Path, kind: str, call: str, result: str
) -> None:
    found = play_call(tmp_path, "verifiers-0.1", "classic_environments", {"kind": kind}, call)
    assert found["messages"][2][1] == result
    assert found["metrics"]["total_tool_calls"] == 1


@pytest.mark.parametrize(
    ("name", "arguments", "turns", "metric"),
    [
        ("null-v1", NULL, 1, "variety"),
        ("null-v1", f'{NULL}, taskset = {{task = {{kind = "tool"}}}}', 1, "calls"),
        ("null-v1", f'{NULL}, taskset = {{task = {{kind = "stateful"}}}}', 1, "calls"),
        ("turns-v1", NULL.replace("agent", "player"), 3, "variety"),
        ("cells-v1", f"agent = {{{HOST}}}", 2, "letters"),
    ],
    ids=["single", "tool", "stateful", "turns", "harness"],
)
def test_i4_a_taskset_of_verifiers_0_4_trains_on_exactly_the_sampled_ids(
    tmp_path: Path, model: Path, name: str, arguments: str, turns: int, metric: str
) -> None:
    steps = train(tmp_path / "run", model, name, "verifiers-0.4", arguments)
    assert [line["rollout/turns_mean"] for line in steps] == [turns] * 2
    assert all(f"reward/{metric}_mean" in line for line in steps)


def test_i4_a_taskset_of_the_package_trains_from_one_command(tmp_path: Path, model: Path) -> None:
    examples = save_examples(tmp_path, make_example(start=7, expected=7), make_example(start=3, expected=7))
    with serve_script([sys.executable, str(ROOT / "tests" / "support" / "nemo_gym_server.py")]) as url:
        taskset = f'taskset = {{dataset = "{examples}", task = {{resources_url = "{url}"}}}}'
        steps = train(tmp_path / "run", model, "nemo-gym", "verifiers-0.4", f"{NULL}, {taskset}")
    assert [line["reward/nemo_gym_mean"] for line in steps] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("kind", "call", "result"), [("tool", '{"name": "look", "arguments": {"cell": 4}}', "17"), ("stateful", COUNT, "1")]
)
def test_i1_tools_of_a_taskset_of_verifiers_0_4_are_called_within_one_row(
    tmp_path: Path, kind: str, call: str, result: str
) -> None:
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    arguments = {"agent": agent, "taskset": {"task": {"kind": kind}}}
    found = play_call(tmp_path, "verifiers-0.4", "null-v1", arguments, call)
    assert found["messages"][2][1] == result
    assert found["metrics"]["calls"] == (kind == "stateful")


def play_call(folder: Path, venv: str, name: str, arguments: dict[str, Any], call: str) -> dict[str, Any]:
    """An attempt in which a scripted model calls a tool and then answers; what became of it."""
    call = f"<tool_call>\n{call}\n</tool_call><|im_end|>"
    words = [name, json.dumps(arguments), call, "It is 17.<|im_end|>", str(folder)]
    printed = run_with_client(folder / "run", venv, str(CLIENTS / "verifiers_calls.py"), *words)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["error"] == "None"
    assert [role for role, _ in found["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert found["is_exact"]
    return found
