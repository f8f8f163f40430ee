"""Tiny causal LMs with random weights: real Hugging Face architectures that run in milliseconds."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(*, vocab_size: int = 64, seed: int = 0) -> Any:
    """A fresh copy of a two-layer Qwen3 in float32 with tied embeddings, in evaluation mode."""
    return copy_model(_tiny_qwen3(vocab_size, seed))


def copy_model(model: Any) -> Any:
    """What `copy.deepcopy` returns, in a third of its time: a module has a dozen empty tables of hooks."""
    return _copy_module(model, {})


def _copy_module(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    if (known := memo.get(id(module))) is not None:
        return known
    copied = memo[id(module)] = type(module).__new__(type(module))
    modules = vars(module)["_modules"]
    for name, value in vars(module).items():
        if value is modules:
            value = {key: None if each is None else _copy_module(each, memo) for key, each in value.items()}
        elif isinstance(value, dict) and not value:
            value = type(value)()
        elif not isinstance(value, _UNCHANGING):
            value = copy.deepcopy(value, memo)
        vars(copied)[name] = value
    return copied


_UNCHANGING = (bool, int, float, str, type(None), type)


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
