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


@functools.cache
def _tiny_qwen3(vocab_size: int, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return Qwen3ForCausalLM(config).eval()
