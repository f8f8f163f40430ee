"""Tiny causal LMs with random weights: real Hugging Face architectures that run in milliseconds."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(*, vocab_size: int = 64, seed: int = 0) -> Any:
    """A fresh copy of a two-layer Qwen3 in float32 with tied embeddings, in evaluation mode."""
    return copy.deepcopy(_tiny_qwen3(vocab_size, seed))


def random_qwen3(*, seed: int = 0, **sizes: Any) -> Any:
    """A Qwen3 of any size with random weights in float32, tied embeddings and no special ids, in evaluation mode."""
    config = Qwen3Config(tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def wide_qwen3(num_hidden_layers: int) -> Any:
    """A Qwen3 whose heads a GPU's attention kernels take, with rows of up to 1,024 of 64 ids."""
    return random_qwen3(
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )


@functools.cache
def _tiny_qwen3(vocab_size: int, seed: int) -> Any:
    return random_qwen3(
        seed=seed,
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
