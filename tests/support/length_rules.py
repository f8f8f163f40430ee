"""Tiny models with rotary factors by length, or with a soft cap, of sizes that vLLM's CPU kernels take."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Gemma2Config, LlamaConfig, Phi3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

ORIGINAL, LONGEST = 64, 512
"""Of longrope: the original length, and the longest."""
_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + number for number in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_CONFIGS = {
    "longrope": (
        Phi3Config,
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": ORIGINAL, "sliding_window": None},
    ),
    "dynamic": (LlamaConfig, {"rope_parameters": _DYNAMIC, "max_position_embeddings": 128}),
    "softcap": (
        Gemma2Config,
        {
            "head_dim": 32,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 1,
            "sliding_window": LONGEST,
            "layer_types": ["full_attention"] * 2,
        },
    ),
}
RULES = tuple(_CONFIGS)


def model_with_rule(rule: str, *, attention: str | None = None, vocab_size: int = 64) -> Any:
    """A fresh model as transformers makes it: `attention` is its implementation, by default transformers' choice."""
    config_class, own = _CONFIGS[rule]
    config = config_class(**copy.deepcopy({**_SIZES, "vocab_size": vocab_size, **own}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
