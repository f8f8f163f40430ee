"""The demo's model: a Qwen3 of about 0.1 million parameters with random weights, in float32."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

CONTEXT_LENGTH = 2048
"""Far more than an episode needs, so that its retokenised form fits as well."""


def build_model(tokenizer: Any, *, seed: int, num_heads: int = 4) -> Any:
    """Make the model for `tokenizer`.

    The initial weights are four times as wide as is usual: at this size, copying is then learnt in a hundred steps.

    Args:
        tokenizer: what gives the vocabulary.
        seed: of the weights.
        num_heads: 4 or 2, which make the heads 16 or 32 wide; vLLM takes none narrower than 32.

    Returns:
        A `Qwen3ForCausalLM`.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=64 // num_heads,
        intermediate_size=128,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)
