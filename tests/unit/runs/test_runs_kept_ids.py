"""A run under top-p: it learns, and its mismatch is rounding, because the trainer has the sampler's sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import letters_recipe
from support.models import tiny_qwen3
from support.servers import server_tokenizer
from unbroken.cli import main


def train(folder: Path, *options: str) -> list[dict[str, float]]:
    """The metrics of each step of the recipe that a random model can learn."""
    tiny_qwen3(vocab_size=len(server_tokenizer())).save_pretrained(folder / "model")
    server_tokenizer().save_pretrained(folder / "model")
    words = ["--model", str(folder / "model"), "--output", str(folder / "run"), "--rollout-log.groups", "1"]
    assert main(["train", str(Path(letters_recipe.__file__)), *words, *options]) in (0, None)
    (lines,) = [file.read_text().splitlines() for file in (folder / "run").rglob("metrics.jsonl")]
    return [json.loads(line) for line in lines]


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_under_top_p_learns_and_its_mismatch_is_rounding(tmp_path):
    learning = ("--loop.num-steps", "12", "--trainer.optimizer.learning-rate", "0.02")
    steps = train(tmp_path, *learning, "--rollouts.sampling.top-p", "0.9", "--rollouts.sampling.temperature", "0.8")
    assert steps[0]["reward/mean"] < 0.8
    assert steps[-1]["reward/mean"] > 0.9
    trained = [step for step in steps if "mismatch/k3" in step]  # a group of equal rewards trains nothing
    assert len(trained) >= 9
    assert all(step["mismatch/max_abs"] < 1e-4 for step in trained)
    assert all(step["mismatch/k3"] < 1e-8 for step in trained)
