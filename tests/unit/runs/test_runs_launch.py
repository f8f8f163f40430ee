"""The commands of docs/models.md for several processes on a CPU, in the environment that a user has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from support import letters_recipe
from support.forks import run_python
from support.processes import free_port, run_processes, run_two
from support.served import save_tiny_model
from support.vllm_session import SMALL_VLLM
from unbroken.runs.processes import without_launcher

pytestmark = pytest.mark.e2e

_SET_BY_LAUNCHERS = ("ACCELERATE_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "TORCHELASTIC_")


def train_arguments(output: Path, model: Path, settings: Mapping[str, Any] | None = None) -> list[str]:
    """The command line of a small run."""
    options = {"output": output, "model": model, "loop.num-steps": 2, "rollouts.group-size": 4}
    options |= {"rollouts.sampling.max-tokens": 8, **(settings or {})}
    return ["train", letters_recipe.__file__, *(f"--{name}={value}" for name, value in options.items())]


def launch(
    launcher: str, *words: str, output: Path, model: Path, settings: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m launcher words -m unbroken train` on a CPU; the launcher is a fork, what it starts is not."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    arguments = (*words, "-m", "unbroken", *train_arguments(output, model, settings))
    with patch.dict(os.environ, variables, clear=True):
        return run_python(launcher, *arguments, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("settings", [{}, {"trainer.parallel.fsdp": 2}])
@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--nproc_per_node", "2", "--master_port"),
        ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port"),
    ],
)
def test_two_processes_that_are_launched_on_a_cpu_train_as_one(tmp_path, model, launcher, settings):
    ended = launch(*launcher, str(free_port()), output=tmp_path / "run", model=model, settings=settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["rollout/num_trajectories"] for line in lines] == [8, 8]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert len(state["processes"]) == 2


def test_two_processes_with_vllm_in_each_train_as_one(tmp_path, model):
    """With what a launcher sets; the tests above have real ones."""
    words = (*SMALL_VLLM, "--max-model-len", "256")
    settings = {"engine.kind": "colocated", "engine.options": json.dumps(words), "loop.num-steps": 3}
    settings |= {"rollouts.problems-per-step": 4, "evaluation.num-problems": 3}
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # or both engines take the first core
    run_two("unbroken", *train_arguments(tmp_path / "run", model, settings), environment=variables)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/num_trajectories"] for line in lines] == [16, 16, 16]  # both processes' halves
    assert [line["train/policy_version"] for line in lines] == [1, 2, 3]
    # Rows of both, sampled by both engines: each has the weights of the step before.
    assert max(line["mismatch/max_abs"] for line in lines) < 1e-4
    evaluations = [json.loads(line) for line in (tmp_path / "run/evaluation.jsonl").read_text().splitlines()]
    assert [line["num_rollouts"] for line in evaluations] == [3, 3]


def test_two_processes_that_share_the_ids_of_their_rows_train_what_both_sampled(tmp_path, model):
    settings = {"trainer.parallel.sequence": 2, "trainer.gradient-checkpointing": "true"}
    run_two("unbroken", *train_arguments(tmp_path / "run", model, settings))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/num_trajectories"] for line in lines] == [8, 8]
    assert [line["train/policy_version"] for line in lines] == [1, 2]
    assert min(line["mismatch/num_tokens"] for line in lines) > 0
    assert max(line["mismatch/max_abs"] for line in lines) < 1e-4


LOSING = """
import asyncio, os, time
from support import letters_recipe
from unbroken.runs.collector import Problems
from unbroken.runs.recipe import Task
from unbroken.rollout.tool_env import ToolEnv

Config = letters_recipe.Config

async def make_task(config):
    def env(number):
        return ToolEnv([{"role": "user", "content": "Write."}], [], reward)

    async def reward(messages):
        if os.environ["RANK"] == "1":
            if config.seed == 2 and os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), 9)
        await asyncio.sleep(600)

    if config.seed == 1 and os.environ["RANK"] == "1":
        raise ValueError("no such row")
    return Task(model=config.model, train_on=Problems(env=env), evaluate_on=Problems(env=env))
"""
"""Process 1 is killed while process 0 waits for rollouts, fails (seed 1), or leaves a fork (seed 2)."""
STEPS_ALONE = {"evaluation.num-problems": 0, "preflight": "false"}
"""The first process alone has a preflight, and its rollouts never end."""


@pytest.mark.parametrize(
    ("settings", "code", "reason"), [({}, -9, "was lost"), ({"seed": 1}, 1, "failed: ValueError: no such row")]
)
def test_a_process_that_is_lost_ends_the_others_with_its_name_whatever_they_wait_for(
    tmp_path, model, settings, code, reason
):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(LOSING)
    words = train_arguments(tmp_path / "run", model, {**STEPS_ALONE, **settings})
    words[1] = str(recipe)
    first, _ = run_processes("unbroken", *words, codes=[1, code])  # rollouts would take longer than it waits
    last = first.splitlines()[-1]
    assert last.startswith("unbroken: rank 1 of 2 (process ")
    assert reason in last


def test_a_process_whose_fork_lives_longer_than_itself_is_lost_all_the_same(tmp_path, model):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(LOSING)
    words = train_arguments(tmp_path / "run", model, {**STEPS_ALONE, "seed": 2})
    words[1] = str(recipe)
    first, _ = run_processes("unbroken", *words, codes=[1, -9])
    assert first.splitlines()[-1].startswith("unbroken: rank 1 of 2 (process ")


@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("killed_before", [1, -9], "rank 1 of 2 has not connected within 3 s: it was lost before"),
        ("ends_well", [0, 1], "failed: ValueError: no such row"),
        ("cannot_listen", [0, 0], "cannot listen for the others (KeyError: 'MASTER_ADDR')"),
        ("strangers", [0, 0], "ended well"),
        ("computes", [0, 0], "ended well"),
        ("first_computes", [0, 0], "ended well"),
        ("interrupted", [1, 1], "closed"),
    ],
)
def test_processes_know_each_other_before_the_run_begins_and_no_stranger_matters(case, codes, said):
    first, second = run_processes("support.lost_process", case, codes=codes)
    assert said in first
    assert ["ended well" in text for text in (first, second)] == [code == 0 for code in codes]


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_whose_first_process_is_on_the_loopback_listens_nowhere_else(size):
    for text in run_processes("support.listening_process", codes=[0] * size):
        addresses = json.loads(text.splitlines()[-1])
        assert set(addresses) <= {"127.0.0.1"}, text
        assert addresses or size == 1


def test_a_first_process_that_cannot_listen_where_it_should_says_so():
    environment = {"MASTER_ADDR": "no.such.host.invalid"}
    (text,) = run_processes("support.listening_process", environment=environment, codes=[1])
    assert "MASTER_ADDR and MASTER_PORT must be an address and a free port of the first process's machine" in text


def test_processes_that_are_started_do_not_see_the_launcher(monkeypatch):
    launched = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with without_launcher():
        assert not launched.keys() & os.environ.keys()
        assert os.environ["PATH"] == before["PATH"]
    assert dict(os.environ) == before


def test_accelerate_launch_that_starts_one_process_of_several_on_a_cpu_is_refused(tmp_path, model):
    accelerate = ("accelerate.commands.launch", "--num_processes", "2", "--cpu")
    ended = launch(*accelerate, output=tmp_path / "run", model=model)
    assert ended.returncode == 1
    assert "accelerate launch starts one process on a CPU" in ended.stderr
    assert "torchrun --nproc_per_node" in ended.stderr
    assert not (tmp_path / "run").exists()
