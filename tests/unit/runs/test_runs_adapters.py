"""Runs with LoRA whose engine gets the adapter alone: the same run, and the options that its engine needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support import letters_recipe
from support.models import tiny_qwen3
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.rollout.policies import PoliciesConfig
from unbroken.runs.config import EngineConfig, EngineKind, LoraConfig, RunConfig
from unbroken.runs.engines import _lora_options, _serve_command
from unbroken.runs.models import prepare_model
from unbroken.training.config import LoopConfig, LoraUpdates, Reference, TrainerConfig
from unbroken.training.loss_config import ReferenceSync


def test_a_run_with_the_adapter_is_the_run_with_merged_weights(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    lines = []
    for updates in ("merged", "adapter"):
        output = tmp_path / updates
        options = [f"--output={output}", f"--model={model}", "--loop.num-steps=3", "--lora.rank=4"]
        assert main(["train", letters_recipe.__file__, *options, f"--trainer.lora-updates={updates}"]) == 0
        lines.append([json.loads(line) for line in (output / "metrics/metrics.jsonl").read_text().splitlines()])
    # Later steps sample from weights that two ways of merging round differently: an id may differ.
    assert lines[0][0]["reward/mean"] == lines[1][0]["reward/mean"]
    for merged, adapter in zip(*lines, strict=True):
        assert max(merged["mismatch/max_abs"], adapter["mismatch/max_abs"]) < 1e-4
        assert adapter["weights/num_bytes"] < merged["weights/num_bytes"] / 2


def test_an_adapter_without_lora_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"trainer\.lora_updates must be merged without lora, got adapter"):
        RunConfig(
            output=Path("x"), loop=LoopConfig(num_steps=1), trainer=TrainerConfig(lora_updates=LoraUpdates.ADAPTER)
        )


@pytest.mark.parametrize("follows", [False, True])
def test_the_reference_of_adapters_is_a_copy_of_the_base_only_if_it_follows_them(follows: bool) -> None:
    trainer = TrainerConfig(kl_weight=0.1, reference_sync=ReferenceSync(every=2) if follows else None)
    config = RunConfig(output=Path("x"), loop=LoopConfig(num_steps=1), lora=LoraConfig(rank=4), trainer=trainer)
    base = tiny_qwen3()
    model, reference = prepare_model(base, config)
    assert model.get_base_model() is base
    if follows:
        expected = dict(tiny_qwen3().named_parameters())
        assert all(torch.equal(expected[name], weight) for name, weight in reference.named_parameters())
        trained = {weight.data_ptr() for weight in model.parameters()}
        assert trained.isdisjoint(weight.data_ptr() for weight in reference.parameters())
    else:
        assert reference is Reference.BASE


def test_an_engine_that_the_run_starts_is_started_for_the_rank() -> None:
    config = EngineConfig(kind=EngineKind.STARTED, options=("--engine", "vllm", "--max-loras", "5"))
    command = _serve_command(config, "m", Path("w"), _lora_options(LoraConfig(rank=17).rank, None))
    assert command[command.index("--enable-lora") :] == [
        "--enable-lora", "--max-lora-rank", "32", "--max-loras", "3", "--engine", "vllm", "--max-loras", "5"
    ]  # fmt: skip
    assert "--enable-lora" not in _serve_command(config, "m", Path("w"))
    assert not EngineConfig(kind=EngineKind.STARTED, options=("--engine", "transformers")).starts_vllm
    policies = PoliciesConfig(names=("solver", "critic"), copy_every=5, num_copies=3)
    assert _lora_options(8, policies)[-1] == "17"  # two versions of 2 policies and 6 copies, and one
    with pytest.raises(InvalidInputError, match=r"lora\.rank must be at most 512 .* got 513"):
        _lora_options(513, None)
