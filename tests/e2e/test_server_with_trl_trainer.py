"""TRL's real `GRPOTrainer` in server mode (TRL 1.11 and later) trains against `unbroken serve` on real vLLM, over gloo.

The same over NCCL on two GPUs: `tests/gpu/trl_native.py`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.served import save_tiny_model, served

NUM_STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    script = Path(__file__).parent / "clients" / "trl_native_trainer.py"
    with served(folder) as server:
        command = [sys.executable, str(script), server.url, str(folder), str(tmp_path_factory.mktemp("out")), "cpu"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def distance(rows: list[list[float]], others: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(rows, others, strict=True) for a, b in zip(one, other, strict=True))


def test_the_trainer_trains_for_its_steps(run: dict[str, Any]) -> None:
    assert tuple(map(int, run["trl"].split(".")[:2])) >= (1, 11)
    assert len(run["history"]) == NUM_STEPS
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in run["history"])
    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in run["history"]]
    assert ratios == pytest.approx([1.0] * NUM_STEPS, abs=1e-3)  # TRL's logprobs are the server's


def test_i6_each_update_is_a_version_that_scores_as_the_trainer_does(run: dict[str, Any]) -> None:
    before, trained, after = run["before"], run["trained"], run["after"]
    assert [one["version"] for one in (before, trained, after)] == [0, NUM_STEPS, NUM_STEPS + 1]
    assert distance(before["server"], before["trainer"]) < 1e-3
    assert distance(after["server"], after["trainer"]) < 1e-3
    assert distance(before["server"], trained["server"]) > 0.01
    assert distance(trained["server"], after["server"]) > 0.01


def test_a_refused_update_reaches_trl_as_an_error_and_leaves_the_weights(run: dict[str, Any]) -> None:
    assert "no weight named 'oops'" in run["refused"]
    assert run["left"] == {"server": run["after"]["server"], "version": run["after"]["version"]}
