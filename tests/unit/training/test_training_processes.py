"""Two processes with uneven rows train as one process with all of them (DDP over gloo, on the CPU)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support import train_process
from support.models import tiny_qwen3
from support.processes import run_two
from unbroken.training.trainer import Trainer


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The folder that two processes saved their weights and statistics into."""
    directory = tmp_path_factory.mktemp("processes")
    run_two("support.train_process", directory)
    return directory


def weights(results: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(results / f"weights-{name}.pt")


def stats(results: Path, name: str) -> list[dict]:
    return [{**step, "seconds": 0.0} for step in json.loads((results / f"stats-{name}.json").read_text())]


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_all_processes_end_with_the_same_weights_and_statistics(results, num_minibatches):
    first, second = (weights(results, f"{num_minibatches}-{rank}") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert stats(results, f"{num_minibatches}-0") == stats(results, f"{num_minibatches}-1")


def test_two_processes_train_as_one_with_all_rows(results):
    trainer = Trainer(tiny_qwen3(), train_process.config(num_minibatches=1))
    steps = [
        trainer.step([*train_process.rows_of(0, step), *train_process.rows_of(1, step)])
        for step in range(len(train_process.NUM_ROWS))
    ]
    together = weights(results, "1-0")
    untrained = dict(tiny_qwen3().named_parameters())
    for name, weight in trainer.named_weights():
        assert (weight - untrained[name]).abs().max() > 1e-3
        torch.testing.assert_close(together[name], weight, atol=1e-5, rtol=0, msg=name)
    for ours, theirs in zip(steps, stats(results, "1-0"), strict=True):
        for name in ("num_rows", "num_tokens", "num_loss_tokens", "num_updates", "policy_version"):
            assert theirs[name] == getattr(ours, name)
        for name in ("loss", "grad_norm", "mean_ratio", "clip_fraction", "k3"):
            assert theirs[name] == pytest.approx(getattr(ours, name), rel=1e-3, abs=1e-5)
        assert theirs["mismatch"]["max_abs"] == pytest.approx(ours.mismatch.max_abs, rel=1e-3)
