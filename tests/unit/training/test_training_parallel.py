"""Processes that share a model by transformers' `DistributedConfig` train as one process with all rows (over gloo)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from support import parallel_process
from support.forks import commands_as_forks, forks_with
from support.parallel_process import CASES

pytestmark = pytest.mark.e2e

NEWER = Path(sys.prefix, "transformers-newer")
"""What experts and replicas need, which `make e2e` installs."""


@pytest.fixture(scope="module")
def newer() -> Iterator[dict[str, str]]:
    """What makes processes forks of one with these transformers."""
    with forks_with(NEWER) as variables:
        yield variables


def start(directory: Path, names: list[str], *, num_processes: int, forks: dict[str, str] | None = None) -> None:
    """Run cases in processes of one torchrun; its error has their output."""
    shared = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    done = subprocess.run(
        [sys.executable, "-m", *command, "-m", "support.parallel_process", directory, *names],
        env=os.environ | shared | (forks or commands_as_forks()),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def check(directory: Path, name: str) -> None:
    """Compare a case with one process: values are those of the model, and of its training."""
    off = parallel_process.compare(directory, name)
    assert off["before"] == 0.0  # every name and value of the whole model
    assert off["logprobs"] < 1e-5
    assert off["steps"] < 1e-4
    assert off["weights"] < 1e-5


def test_two_processes_with_parts_of_a_model_train_as_one(tmp_path):
    has_tensor = Version(transformers.__version__) < Version("5.23")  # newer ones have it with fsdp above 1 only
    names = ["fsdp", "rslora", *(["tensor"] if has_tensor else [])]
    start(tmp_path, names, num_processes=2)
    for name in names:
        check(tmp_path, name)


@pytest.mark.skipif(not NEWER.exists(), reason="newer transformers are not installed beside ours (make e2e)")
def test_four_processes_with_shards_of_parts_train_as_one(tmp_path, newer):
    start(tmp_path, ["both"], num_processes=4, forks=newer)
    check(tmp_path, "both")


@pytest.mark.skipif(not NEWER.exists(), reason="newer transformers are not installed beside ours (make e2e)")
@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_with_experts_of_their_own_or_replicas_train_as_one(tmp_path, newer, num_processes):
    names = [
        name
        for name, case in CASES.items()
        if case.parallel.num_processes == num_processes
        and max(case.parallel.expert, case.parallel.replicate) > 1
        and case.family is None
    ]
    start(tmp_path, names, num_processes=num_processes, forks=newer)
    for name in names:
        check(tmp_path, name)


def test_two_processes_with_parts_of_a_model_that_takes_images_train_as_one(tmp_path):
    pytest.importorskip("torchvision", reason="the image processors of transformers need it")
    names = ["images", "images-lora"]
    start(tmp_path, names, num_processes=2)
    for name in names:
        check(tmp_path, name)


@pytest.mark.skipif(not NEWER.exists(), reason="newer transformers are not installed beside ours (make e2e)")
def test_replicas_of_a_model_that_takes_images_train_as_one(tmp_path, newer):
    pytest.importorskip("torchvision", reason="the image processors of transformers need it")
    start(tmp_path, ["images-replicas"], num_processes=4, forks=newer)
    check(tmp_path, "images-replicas")
