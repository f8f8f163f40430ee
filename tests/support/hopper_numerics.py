"""Exact numerics with vLLM on a Hopper GPU: of tests/gpu/test_cuda_exact_numerics.py, and a script without pytest.

    PYTHONPATH=src:tests python -m support.hopper_numerics                       # all cases, with CUDA graphs
    PYTHONPATH=src:tests python -m support.hopper_numerics qwen3 lora --enforce-eager
    PYTHONPATH=src:tests python -m support.hopper_numerics --tensor-parallel-size=2      # on two GPUs

The script prints a line of JSON for each step, and ends with 1 if a logprob differed. It loads nothing from a network.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

# cuBLAS reads its two once, before the first product.
os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoConfig, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

from support.adapted import with_lora
from support.rollouts import play_turns
from support.rows import random_rows
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.trainer import Trainer
from unbroken.types import Numerics, SamplingParams
from unbroken.weights.base import InProcessPublisher

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


def make_model(config: Any, auto: Any = AutoModelForCausalLM) -> Any:
    """Random, with norms that are not 1 and wide distributions: where an id is certain, all arithmetic is equal."""
    torch.manual_seed(0)
    model = auto.from_config(copy.deepcopy(config))  # of which a trainer changes the attention
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.normal_(0, 0.8 / weight.shape[1] ** 0.5)
    return model


def make_trainer(model: Any, *options: str) -> Trainer:
    config = TrainerConfig(
        numerics=Numerics.EXACT,
        sampler_tensor_parallel=next((int(word[-1]) for word in options if "tensor-parallel" in word), 1),
        warn_of_inexact=True,
        tokens_per_micro_batch=8192,
        optimizer=OptimizerConfig(learning_rate=1e-4),
    )
    return Trainer(model, config, accelerator=Accelerator(mixed_precision="bf16"))


async def sample_and_train(trainer: Trainer, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Sample conversations from the model in the folder and train on them, step by step; the metrics of each."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    small = [] if (folder / "tokenizer.json").exists() else ["--skip-tokenizer-init"]
    small += ["--kv-cache-memory-bytes", str(2**30), "--gpu-memory-utilization", "0.05"]
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


def save_vision_model(folder: Path) -> Any:
    """A Qwen2.5-VL with tokenizer and processor, whose text has heads of 128."""
    from support.vision import save_vision_model as save_tiny

    save_tiny(folder)
    config = AutoConfig.from_pretrained(folder)
    config.vision_config.out_hidden_size = SIZES["hidden_size"]
    for name, value in {**SIZES, "vocab_size": config.text_config.vocab_size, "tie_word_embeddings": True}.items():
        setattr(config.text_config, name, value)
    config.text_config.rope_parameters["mrope_section"] = [16, 24, 24]
    model = make_model(config, AutoModelForImageTextToText)
    model.save_pretrained(folder)
    return model


def make_case(case: str, folder: Path, *options: str) -> Trainer:
    """The trainer of a family, `lora` or `vision`, whose model is written into the folder."""
    if case == "lora":
        trainer = make_trainer(with_lora(make_model(FAMILIES["qwen3"])), *options)
        save_merged(trainer, folder)
        return trainer
    if case == "vision":
        return make_trainer(save_vision_model(folder), *options)
    model = make_model(FAMILIES[case])
    model.save_pretrained(folder)
    return make_trainer(model, *options)


def save_merged(trainer: Trainer, folder: Path) -> None:
    merged = make_model(FAMILIES["qwen3"])
    merged.load_state_dict(dict(trainer.named_weights()), strict=False)
    merged.save_pretrained(folder)


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


def main() -> int:
    """Run cases; 1 if one failed."""
    options, num_failed = [word for word in sys.argv[1:] if word.startswith("--")], 0
    for case in [word for word in sys.argv[1:] if not word.startswith("--")] or [*FAMILIES, "lora", "vision"]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                steps = asyncio.run(sample_and_train(make_case(case, Path(folder), *options), Path(folder), *options))
                for metrics in steps:
                    shown = ("num_tokens", "equal_share", "max_abs", "k3")
                    print(
                        json.dumps({"case": case, **{name: metrics[f"mismatch/{name}"] for name in shown}}), flush=True
                    )
                check_equal(steps)
                if case in FAMILIES:
                    print(json.dumps({"case": case, "least cosine": min(compare_gradients(case).values())}), flush=True)
            except Exception:
                num_failed += 1
                print(json.dumps({"case": case, "failed": traceback.format_exc()}), flush=True)
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
