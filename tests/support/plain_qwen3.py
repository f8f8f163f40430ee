"""Qwen3 with LoRA, its losses' sums and AdamW in plain torch and float64: nothing of transformers, PEFT or ours.

Weights are by the names of the model's file, and those of an adapter by PEFT's. Norms and angles are in float32, as
transformers computes them whatever the type of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

ALPHA = 32
Weights = Mapping[str, torch.Tensor]


def compute_logprobs(weights: Weights, adapter: Weights, config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """[T, V] the log softmax after each of T ids."""

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ weights[f"{name}.weight"].T
        a = adapter.get(f"base_model.model.{name}.lora_A.weight")
        if a is None:
            return out
        return out + (x @ a.T) @ adapter[f"base_model.model.{name}.lora_B.weight"].T * (ALPHA / len(a))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return normed.double() * weights[f"{name}.weight"]

    length, width = len(input_ids), config.head_dim
    frequencies = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(length).float()[:, None] * frequencies
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None].double() for f in (torch.cos, torch.sin))
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    x = weights["model.embed_tokens.weight"][input_ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        inner = norm(f"{prefix}.input_layernorm", x)
        q, k, v = (project(f"{prefix}.self_attn.{name}_proj", inner).view(length, -1, width) for name in "qkv")
        q, k = (rotate(norm(f"{prefix}.self_attn.{n}_norm", each)) for n, each in (("q", q), ("k", k)))
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(width)
        shares = scores.masked_fill(future, -math.inf).softmax(-1)
        attended = torch.einsum("hts,shd->thd", shares, v).reshape(length, -1)
        x = x + project(f"{prefix}.self_attn.o_proj", attended)
        inner = norm(f"{prefix}.post_attention_layernorm", x)
        gate, up = (project(f"{prefix}.mlp.{name}_proj", inner) for name in ("gate", "up"))
        x = x + project(f"{prefix}.mlp.down_proj", gate * gate.sigmoid() * up)
    return project("lm_head", norm("model.norm", x)).log_softmax(-1)


class PlainAdamW:
    """AdamW by its formula, with the clipping of the sum of squares."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.first = {name: torch.zeros_like(each) for name, each in parameters.items()}
        self.second = {name: torch.zeros_like(each) for name, each in parameters.items()}
        self.num_steps = 0

    def step(
        self,
        gradients: Weights,
        *,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> float:
        """Make a step, and return the norm of the gradients."""
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
        scale = min(1.0, grad_clip_norm / (norm + 1e-6)) if grad_clip_norm else 1.0
        self.num_steps += 1
        for name, parameter in self.parameters.items():
            gradient = gradients[name] * scale
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
            mean = self.first[name] / (1 - beta1**self.num_steps)
            root = (self.second[name] / (1 - beta2**self.num_steps)).sqrt() + eps
            self.parameters[name] = parameter * (1 - learning_rate * weight_decay) - learning_rate * mean / root
        return norm


def find_gradients(parameters: dict[str, torch.Tensor], loss_of: Callable[[Weights], torch.Tensor]) -> dict[str, Any]:
    """The gradient for each parameter, by autograd."""
    leaves = {name: each.detach().clone().requires_grad_() for name, each in parameters.items()}
    found = torch.autograd.grad(loss_of(leaves), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))
