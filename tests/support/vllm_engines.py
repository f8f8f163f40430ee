"""Real vLLM engines on tiny models, made in a folder: with a tokenizer of single characters and a LoRA adapter."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import support.vllm_processes  # noqa: F401  # engines start in less time
from support.architectures import tiny_model
from support.vllm_session import SMALL_VLLM
from unbroken.engines.vllm import VllmEngine, parse_engine_args

VOCAB_SIZE = 64
CONTEXT_LENGTH = 256
MAX_TOP_LOGPROBS = 8
END = "<|end|>"
CHARACTERS = string.digits + string.ascii_lowercase + '{}[]":,. -_' + string.ascii_uppercase[:16]
"""Ids 1 to 63, in order; 0 is `END`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The engine of a test session, and what it was started with."""

    engine: VllmEngine
    adapter: str
    adapter_folder: Path


def tiny_vllm_model(seed: int = 0, *, tied: bool = True) -> Any:
    """A Qwen3 with a head size that vLLM's CPU kernels support, and the vocabulary of the tokenizer."""
    return tiny_model("qwen3", seed=seed, head_dim=32, tie_word_embeddings=tied)


async def start_engine(folder: Path, *options: str, adapters: tuple[tuple[str, str], ...] = ()) -> VllmEngine:
    """Start vLLM on the model in `folder`, in float32."""
    fixed = [*SMALL_VLLM, "--max-model-len", str(CONTEXT_LENGTH)]
    limits = ["--max-logprobs", str(MAX_TOP_LOGPROBS), "--max-num-seqs", "64"]
    return await VllmEngine.start(
        parse_engine_args(["--model", str(folder), *fixed, *limits, *options]), adapters=adapters
    )


async def start_shared(folder: Path) -> Shared:
    """Start the engine that most tests share: tied embeddings, tokenizer, one adapter."""
    save_model(folder / "model", tiny_vllm_model())
    save_adapter(folder / "adapter")
    engine = await start_engine(
        folder / "model",
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--max-loras",
        "3",
        adapters=(("pirate", str(folder / "adapter")),),
    )
    return Shared(engine=engine, adapter="pirate", adapter_folder=folder / "adapter")


def save_model(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def character_tokenizer() -> Any:
    """A tokenizer of 64 ids: the end of text, and one for each of `CHARACTERS`."""
    vocab = {END: 0} | {character: number for number, character in enumerate(CHARACTERS, start=1)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def save_adapter(folder: Path, *, rank: int = 4, alpha: int = 16) -> None:
    """Write a LoRA adapter for the attention's q and v projections, as PEFT writes it."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in tiny_vllm_model().named_parameters():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")


def with_adapter(model: Any, folder: Path) -> Any:
    """The model with an adapter's product added to its weights."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in tensors:
                product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
                weight += product * config["lora_alpha"] / config["r"]
    return model
