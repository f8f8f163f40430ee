"""What merging a LoRA adapter into bfloat16 weights loses, against the adapter computed beside them.

    OMP_NUM_THREADS=1 python bench/lora_rounding.py

The engine is transformers' forward in bfloat16, on a random Qwen3 whose weights bfloat16 has exactly; the trainer is
the same model with float32 weights, in float32 or under autocast. k3 is that of the trainer against the engine.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

_SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 4, "intermediate_size": 768, "tie_word_embeddings": True, "initializer_range": 0.05,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@torch.no_grad()
def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, T - 1] of each id after the first."""
    logits = torch.log_softmax(model(ids).logits.float(), -1)
    return logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0].double()


def k3(trainer: torch.Tensor, engine: torch.Tensor) -> float:
    difference = trainer - engine
    return float((torch.exp(difference) - 1 - difference).mean())


@torch.no_grad()
def set_adapter(model: Any, spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)


def main() -> None:
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**_SIZES)).eval()
    for parameter in base.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.randint(0, _SIZES["vocab_size"], (8, 128))
    trained = get_peft_model(copy.deepcopy(base), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for spread in (0.0, 1e-4, 1e-3, 1e-2):
        set_adapter(trained, spread)
        in_float32 = logprobs_of(trained, ids)
        with torch.autocast("cpu", torch.bfloat16):
            in_bfloat16 = logprobs_of(trained, ids)
        whole = dict(copy.deepcopy(trained).merge_and_unload().named_parameters())
        kept = [float((whole[n].bfloat16() == w).double().mean()) for n, w in base.named_parameters() if "proj" in n]
        print(f"spread of B {spread:g}: merging leaves {np.mean(kept):.1%} of the weights as they are")
        for name, engine in (
            ("merged", copy.deepcopy(trained).merge_and_unload().bfloat16()),
            ("adapter", copy.deepcopy(trained).bfloat16()),
        ):
            found = logprobs_of(engine, ids)
            print(f"  {name:8} k3 to a trainer in bfloat16 {k3(in_bfloat16, found):.3e}, in float32 "
                  f"{k3(in_float32, found):.3e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
