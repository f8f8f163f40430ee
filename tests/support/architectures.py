"""Tiny random models of several architectures, for tests of what must hold for any model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from support.models import copy_model

VOCAB_SIZE = 64
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_GROUPED, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_GROUPED, tie_word_embeddings=False),
    "gemma": lambda: GemmaConfig(**{**_GROUPED, "num_key_value_heads": 1}),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=None),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_SIZES, num_key_value_heads=2, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_GROUPED, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
ARCHITECTURES = tuple(_CONFIGS)


def tiny_model(architecture: str = "qwen3", *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A fresh copy of a two-layer model in float32 and evaluation mode; `changes` go into its config."""
    return copy_model(_tiny_model(architecture, seed, attention, tuple(sorted(changes.items()))))


@functools.cache
def _tiny_model(architecture: str, seed: int, attention: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    config = _CONFIGS[architecture]()
    for name, value in changes:
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
