"""Exact numerics with vLLM on a Hopper GPU: engine and trainer have the same bits, with and without graphs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from support.adapted import with_lora
from support.rollouts import play_turns
from support.rows import random_rows
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.trainer import Trainer
from unbroken.types import Numerics, SamplingParams
from unbroken.weights.in_process import InProcessPublisher

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="1")  # read once, by whatever test is first

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
    "llama": LlamaConfig(**SIZES, head_dim=64),
    "mistral": MistralConfig(**SIZES, head_dim=128, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "gemma": GemmaConfig(**SIZES, head_dim=256),
}
"""With heads of 128, 64, 128, 128 and 256."""
STEPS = (
    SamplingParams(max_tokens=96, temperature=1.0),
    SamplingParams(max_tokens=96, temperature=0.9),
    SamplingParams(max_tokens=96, temperature=0.7),
    SamplingParams(max_tokens=96, temperature=0.6, top_k=20, return_kept_ids=True),
)


def make_model(config: Any) -> Any:
    """Random, with norms that are not 1 and wide distributions: where an id is certain, all arithmetic is equal."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.normal_(0, 0.8 / weight.shape[1] ** 0.5)
    return model


def make_trainer(model: Any) -> Trainer:
    config = TrainerConfig(
        numerics=Numerics.EXACT, tokens_per_micro_batch=8192, optimizer=OptimizerConfig(learning_rate=1e-4)
    )
    return Trainer(model, config, accelerator=Accelerator(mixed_precision="bf16"))


async def sample_and_train(trainer: Trainer, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Sample conversations from the model in the folder and train on them, step by step; the metrics of each."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    small = ["--skip-tokenizer-init", "--kv-cache-memory-bytes", str(2**30), "--gpu-memory-utilization", "0.05"]
    small += ["--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--max-logprobs", "32"]
    arguments = parse_engine_args(["--model", str(folder), *small, *options])
    engine = await VllmEngine.start(arguments, numerics=Numerics.EXACT)
    found = []
    try:
        for step, params in enumerate(STEPS):
            rows = await play_turns(engine, params, seed=step, longest_given=900, num_agents=24)
            sampled = np.concatenate([row.rollout_logprobs[row.loss_mask] for row in rows])
            metrics = step_metrics(await asyncio.to_thread(trainer.step, rows))
            metrics["certain"] = float(np.mean(sampled > -1e-4))
            metrics["distinct"] = len(np.unique(sampled)) / len(sampled)
            found.append(metrics)
            await InProcessPublisher(engine).publish(trainer.named_weights(), policy_version=trainer.policy_version)
    finally:
        await engine.close()
    return found


def check_equal(steps: list[dict[str, Any]]) -> None:
    for metrics in steps:
        assert metrics["certain"] < 0.02  # else any two programs were equal
        assert metrics["distinct"] > 0.5
        assert metrics["mismatch/num_tokens"] > 1000
        assert metrics["mismatch/max_abs"] == 0.0
        assert metrics["mismatch/equal_share"] == 1.0


@pytest.mark.parametrize("options", [[], ["--enforce-eager"]], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_all_logprobs_are_vllms_to_the_bit_at_every_step(family, options, tmp_path: Path):
    model = make_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    check_equal(await sample_and_train(make_trainer(model), tmp_path, *options))


async def test_adapters_that_the_sampler_has_merged_are_equal(tmp_path: Path):
    model = make_model(FAMILIES["qwen3"])
    trained = with_lora(model)
    trainer = make_trainer(trained)
    save_merged(trainer, tmp_path)
    check_equal(await sample_and_train(trainer, tmp_path))


def save_merged(trainer: Trainer, folder: Path) -> None:
    merged = make_model(FAMILIES["qwen3"])
    merged.load_state_dict(dict(trainer.named_weights()), strict=False)
    merged.save_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_same_layers_in_float32(family):
    for name, cosine in compare_gradients(family).items():
        assert cosine > 0.99, name


def compare_gradients(family: str) -> dict[str, float]:
    rows = random_rows(np.random.default_rng(0), 8, longest=300)
    ids_BT = torch.zeros(len(rows), 300, dtype=torch.int64, device="cuda")
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for lane, row in enumerate(rows):
        ids_BT[lane, : len(row.token_ids)] = torch.from_numpy(row.token_ids.astype(np.int64))
        mask_BT[lane, : len(row.token_ids)] = torch.from_numpy(row.sampled_mask.copy())
    model = make_model(FAMILIES[family]).cuda()
    plain = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].log_softmax(-1)
    plain.gather(-1, ids_BT[:, 1:, None])[..., 0][mask_BT[:, 1:]].sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    make_trainer(model).backend.policy(ids_BT, mask_BT, 1.0).logprobs_N.sum().backward()
    return {
        name: float(torch.cosine_similarity(weight.grad.flatten(), expected[name].flatten(), dim=0))
        for name, weight in model.named_parameters()
    }
