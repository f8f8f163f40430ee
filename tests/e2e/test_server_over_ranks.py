"""`unbroken serve` over two workers: what must reach all of them does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from support.ranks import RankChecks
from support.served import save_tiny_model, served

WHOLE = ("world_size", "scores", "update", "refusal", "adapter", "sleep", "packed")
LORA = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")


@pytest.mark.parametrize("parallel", ["tensor", pytest.param("data", marks=pytest.mark.nightly)])
def test_what_must_reach_each_worker_does(tmp_path: Path, parallel: str) -> None:
    """As a command, whose processes are not forks of one: they differ in the order of sets. It takes 90 CPU seconds."""
    check(tmp_path, parallel, WHOLE, as_command=True)


@pytest.mark.parametrize("names", [WHOLE, ("policy_adapter",)], ids=["whole", "adapter"])
def test_what_must_reach_each_copy_of_vllms_engine_does(tmp_path: Path, names: tuple[str, ...]) -> None:
    check(tmp_path, "data", names, as_command=False)


def check(tmp_path: Path, parallel: str, names: tuple[str, ...], *, as_command: bool) -> None:
    folder, weights = save_tiny_model(tmp_path / "model", num_key_value_heads=2), tmp_path / "weights"
    weights.mkdir()
    options = (f"--{parallel}-parallel-size", "2", "--weights-dir", str(weights), *LORA)
    with served(folder, *options, as_command=as_command) as running:
        checks = RankChecks(
            url=running.url,
            model=AutoModelForCausalLM.from_pretrained(folder).eval(),
            weights=weights,
            num_workers=2,
            tolerance=2e-5,
        )
        found = asyncio.run(checks.run(*names))
    assert tuple(found) == names
    assert all(found.values())
