"""The names and values under which a trained model's weights leave the trainer, however it is wrapped.

    unwrapped, DDP, FSDP2    model.layers.0.self_attn.q_proj.weight
    activation checkpoints   model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight
    LoRA (PEFT)              base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight, lora_A, lora_B

all leave as the first, whole, each once: a weight tied to another is not repeated, and adapters are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from unbroken.training.model.adapters import is_adapted, merged_parameters
from unbroken.training.model.sharding import full

_WRAPPERS = ("_checkpoint_wrapped_module.",)


def full_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own names and whole tensors, adapters merged into copies.

    Where parameters are sharded, every process goes through all of them.
    """
    named = merged_parameters(model, whole=full) if is_adapted(model) else _full(model.named_parameters())
    return ((_own_name(name), tensor) for name, tensor in named)


def kept_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """What a checkpoint holds, by name: all parameters, or of a model with adapters those that train."""
    parameters = {_own_name(name): parameter for name, parameter in model.named_parameters()}
    if not is_adapted(model):
        return parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def full_kept(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of `kept_parameters`; where they are sharded, every process goes through all of them."""
    return _full(kept_parameters(model).items())


def _full(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, full(tensor)) for name, tensor in named)


def _own_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
