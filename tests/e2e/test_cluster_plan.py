"""`unbroken cluster plan`: what it prints is run as it is, on this machine, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.clusters import RECIPE
from support.forks import commands_as_forks, run_python
from support.processes import free_port
from support.served import save_tiny_model

pytestmark = pytest.mark.e2e


def test_the_commands_of_a_plan_train_as_they_are_printed(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    variables = {**commands_as_forks(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    plan = run_python(
        "unbroken", "cluster", "plan", RECIPE, "--trainers", "1x2", "--engines", "2", "--cpu", "--hosts", "127.0.0.1",
        "--port", str(free_port()), "--engine.options=--engine transformers",
        *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")),
        "--", f"--output={tmp_path / 'run'}", f"--model={model}", "--loop.num-steps=2", timeout=60,
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    script = f"set -e; trap 'kill $(jobs -p); wait' EXIT\n{plan.stdout}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/policy_version"] for line in lines] == [1, 2]
