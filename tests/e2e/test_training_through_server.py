"""Training with generation in a server: `unbroken serve` in a process, rollouts over HTTP, weights through files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from support.loops import EachStep
from support.served import save_tiny_model, served
from support.servers import server_tokenizer
from support.steps import train
from unbroken.client import AsyncClient
from unbroken.engines.http import HttpEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams
from unbroken.weights.disk import DiskPublisher

NUM_STEPS = 4


def letters(messages) -> float:
    """Share of letters in the last message: a random model gets some, never all."""
    text = messages[-1]["content"] or " "
    return sum(map(str.isalpha, text)) / len(text)


async def reinforce(url: str, model_folder: Path, weights: Path, output: Path) -> Trainer:
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model_folder), TrainerConfig(optimizer=OptimizerConfig(learning_rate=3e-3))
    )
    engine = await HttpEngine.connect([url])
    renderer = TemplateRenderer(server_tokenizer())

    async def sample(number: int) -> TrajectoryGroup:
        return await run_group(
            lambda: ToolEnv([{"role": "user", "content": "Write."}], [], letters),
            8,
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=24),
            limits=Limits(max_turns=1),
        )

    async with AsyncClient(url) as client:
        with MetricsWriter(output) as metrics:
            await train(
                EachStep(sample),
                trainer=trainer,
                publisher=DiskPublisher([client], weights),
                metrics=metrics,
                config=LoopConfig(num_steps=NUM_STEPS),
            )
        assert await client.policy_version() == NUM_STEPS
        prompt = renderer.render([{"role": "user", "content": "Write."}]).token_ids
        (result,) = await client.generate([prompt], SamplingParams(max_tokens=24))
        (scored,) = await client.score([[*prompt, *result.sequences[0].completion_ids]])
        np.testing.assert_allclose(scored.logprobs[len(prompt) - 1 :], result.sequences[0].rollout_logprobs, atol=1e-4)
    await engine.close()
    return trainer


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_i6_each_step_samples_with_the_weights_of_the_step_before(tmp_path: Path, engine: str) -> None:
    folder, weights = save_tiny_model(tmp_path / "model"), tmp_path / "weights"
    with served(folder, "--weights-dir", str(weights), engine=engine) as running:
        trainer = asyncio.run(reinforce(running.url, folder, weights, tmp_path / "metrics"))
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/policy_version"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert trainer.policy_version == NUM_STEPS
    for line in lines:
        assert line["train/num_rows"] == 8
        assert line["staleness/max"] == 0
        # An update that did not arrive, or arrived wrong, would show here from the second step on.
        assert line["mismatch/k3"] < 1e-8
        assert line["mismatch/max_abs"] < 1e-4
        assert line["weights/num_bytes"] > 100_000
    moved = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    new = dict(trainer.named_weights())["model.embed_tokens.weight"]
    assert (new - moved).abs().max() > 1e-3
