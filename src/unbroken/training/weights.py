"""The names and values under which a trained model's weights leave the trainer, however it is wrapped.

    unwrapped, DDP, FSDP2    model.layers.0.self_attn.q_proj.weight
    activation checkpoints   model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight

all leave as the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unbroken.training.sharding import full

_WRAPPERS = ("_checkpoint_wrapped_module.",)


def own_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter once, under the name that the model gave it before it was wrapped."""
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def full_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors; where parameters are sharded, every process goes through all of them."""
    return ((name, full(parameter)) for name, parameter in own_parameters(model))
