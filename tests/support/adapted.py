"""Tiny models with LoRA adapters that already differ from their base."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from support.models import tiny_qwen3

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


def untied_qwen3(*, seed: int = 0) -> Any:
    """`tiny_qwen3` with its own output embeddings."""
    config = copy.deepcopy(tiny_qwen3(seed=seed).config)
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return type(tiny_qwen3())(config).eval()


def with_lora(base: Any, *, seed: int = 0, adapter_name: str = "default", **config: Any) -> Any:
    """`base` with one adapter whose B is not zero."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS)} | config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options), adapter_name=adapter_name)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "lora_" in name:
                    parameter.normal_(std=0.1)
    return model
