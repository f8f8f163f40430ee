"""Tiny random models by the name of their config's class, for tests of which models are packed or share prefixes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build_named(name: str, changes: dict[str, Any], attention: str = "sdpa") -> Any:
    """A model of `transformers.NAME`, with the same weights in each call."""
    sizes = {} if name in ("GPT2Config", "BloomConfig") else SIZES
    base = {key: SIZES[key] for key in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")}
    config = getattr(transformers, name)(**{**base, **sizes, **changes})
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
