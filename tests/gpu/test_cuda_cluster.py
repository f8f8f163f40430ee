"""A cluster of two GPUs: one trains, vLLM samples on the other, and each part is killed once."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.clusters import ClusterRun
from support.served import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
]

NUM_STEPS, HELD_STEP = 10, 8
ENGINE = "--engine vllm --dtype bfloat16 --max-model-len 1024 --gpu-memory-utilization 0.2 --enforce-eager"


def test_a_run_ends_well_after_its_engine_its_sampler_and_its_trainer_were_killed(tmp_path):
    model = save_tiny_model(tmp_path / "model", hidden_size=256, num_attention_heads=4, head_dim=64)
    local: Any = SimpleNamespace(address="local", environment={})
    own = [
        f"--loop.num-steps={NUM_STEPS}", "--checkpoints.every=1", "--rollouts.group-size=4",
        "--rollouts.sampling.max-tokens=16", "--trainer.optimizer.learning-rate=1e-5", "--loop.max-empty-steps=none",
    ]  # fmt: skip
    parts = ["--trainers", "1x1", "--engines", "1", "--samplers", "1"]
    run = ClusterRun(local, tmp_path / "run", model, parts, own, machine=[f"--engine.options={ENGINE}"])
    try:
        run.hold(HELD_STEP)
        for number, name in enumerate(("engine-0", "sampler-0", "trainers-0")):
            run.wait_for_steps(2 * number + 2)
            run.kill(name)
        run.go_on()
        run.finish()
    finally:
        run.close()
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    versions = [step["train/policy_version"] for step in steps]
    assert versions == sorted(versions)
    assert sorted(run.problems()) == list(range(2 * NUM_STEPS))
    trained = [step for step in steps if step["train/num_rows"] > 0]  # a random model's rewards can be equal
    assert trained
    assert all(step["staleness/max"] == 0 and step["mismatch/k3"] < 1e-2 for step in trained)
    assert all(len(run.reasons(name)) == 1 for name in ("engine-0", "trainers"))
