"""Routing replay in a run: one setting of the trainer makes engines record experts, and requests ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from support import letters_recipe
from support.architectures import tiny_model
from support.servers import server_tokenizer
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.collector import Problems
from unbroken.runs.config import EngineConfig, EngineKind, RunConfig
from unbroken.runs.engines import _serve_command, open_engine
from unbroken.runs.processes import Rank
from unbroken.runs.recipe import Task
from unbroken.runs.run import open_run
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.types import SampleRequest, SamplingParams

ASKING = SamplingParams(max_tokens=3, return_routed_experts=True)


def open_embedded(output: Path, **options: Any) -> Any:
    return open_engine(
        EngineConfig(),
        model=tiny_model("qwen3_moe"),
        source="tiny",
        output=output,
        device=torch.device("cpu"),
        rank=Rank(),
        **options,
    )


async def test_the_embedded_engine_of_a_run_records_experts(tmp_path):
    async with open_embedded(tmp_path, records_routing=True) as found:
        result = await found.engine.sample(SampleRequest(request_id="a", prompt_ids=[1, 2], params=ASKING))
    (sequence,) = result.sequences
    assert sequence.routed_experts.shape == (4, 2, 2)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_server_that_the_run_starts_records_them_with_either_engine(engine):
    config = EngineConfig(kind=EngineKind.STARTED, options=("--engine", engine))
    assert "--enable-return-routed-experts" in _serve_command(config, "m", Path("w"), records_routing=True)
    assert "--enable-return-routed-experts" not in _serve_command(config, "m", Path("w"))


def save_model(folder: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=len(server_tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    server_tokenizer().save_pretrained(folder)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("replays", [True, False])
def test_a_run_replays_the_experts_of_its_rollouts_by_one_setting(tmp_path, replays):
    """In bfloat16, where routers choose other experts than the engine's in float32: with replay the mismatch is small.
    The second step's engine has the weights of the first."""
    save_model(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "run"), "--loop.num-steps", "2"]
    options += ["--trainer.routing-replay", str(replays).lower(), "--precision", "bfloat16"]
    options += ["--rollouts.problems-per-step", "2", "--rollouts.group-size", "2", "--rollout-log.groups", "0"]
    options += ["--trainer.optimizer.learning-rate", "0.001"]
    assert main(["train", str(Path(letters_recipe.__file__)), *options]) in (0, None)
    (lines,) = [file.read_text().splitlines() for file in (tmp_path / "run").rglob("metrics.jsonl")]
    assert len(lines) == 2
    for metrics in map(json.loads, lines):
        if replays:
            assert metrics["mismatch/routing_live_share"] == 0
            assert 0 < metrics["mismatch/routing_differs"] < 0.2
            assert metrics["mismatch/k3"] < 5e-4
        else:
            assert metrics["mismatch/routing_differs"] is None


async def test_a_run_with_agents_refuses_it_before_anything_is_loaded(tmp_path):
    def agent(number: int) -> Any:
        raise AssertionError("no problem is made")

    config = RunConfig(output=tmp_path, loop=LoopConfig(num_steps=1), trainer=TrainerConfig(routing_replay=True))
    task = Task(model="none", train_on=Problems(agent=agent), evaluate_on=())
    with pytest.raises(InvalidInputError, match="routing_replay must be false for problems with agents"):
        async with open_run(config, task, accelerator=Accelerator(cpu=True)):
            pass
