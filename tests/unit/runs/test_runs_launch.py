"""The commands of docs/training.md for several processes on a CPU, in the environment that a user has."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import letters_recipe
from support.served import save_tiny_model

pytestmark = pytest.mark.processes

_SET_BY_LAUNCHERS = ("ACCELERATE_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "TORCHELASTIC_")


def launch(*words: str, output: Path, model: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `words -m unbroken train` on a small recipe, on a CPU, without anything that a launcher would set."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    options = {"output": output, "model": model, "loop.num-steps": 2, "rollouts.group-size": 4}
    options |= {"rollouts.sampling.max-tokens": 8}
    return subprocess.run(
        [sys.executable, *words, "-m", "unbroken", "train", letters_recipe.__file__]
        + [f"--{name}={value}" for name, value in options.items()],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--nproc_per_node", "2", "--master_port"),
        ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port"),
    ],
)
def test_two_processes_that_are_launched_on_a_cpu_train_as_one(tmp_path, model, launcher):
    ended = launch("-m", *launcher, str(free_port()), output=tmp_path / "run", model=model)
    assert ended.returncode == 0, ended.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["rollout/num_trajectories"] for line in lines] == [8, 8]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert len(state["processes"]) == 2


def test_accelerate_launch_that_starts_one_process_of_several_on_a_cpu_is_refused(tmp_path, model):
    accelerate = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu")
    ended = launch(*accelerate, output=tmp_path / "run", model=model)
    assert ended.returncode == 1
    assert "accelerate launch starts one process on a CPU" in ended.stdout
    assert "torchrun --nproc_per_node" in ended.stdout
    assert not (tmp_path / "run").exists()
