"""Names and values of a trained model's weights, independent of what wraps the model.

    unwrapped, DDP, FSDP2    model.layers.0.self_attn.q_proj.weight
    activation checkpoints   model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight
    LoRA (PEFT)              base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight, lora_A, lora_B

All become the first: whole tensors, each once (a weight tied to another is not repeated), adapters merged. They are
streams: names, dtypes and shapes are known before anything is gathered or merged, and one tensor is made at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unbroken.training.model.adapters import gather_adapter, is_adapted, merge_parameters, strip_wrappers
from unbroken.training.model.sharding import gather_tensor
from unbroken.weights.sources import TensorSpec, WeightStream


def gather_weights(model: Any) -> WeightStream:
    """The model's own names and whole tensors, with merged adapters; if sharded, every process must gather all."""

    def read(gather: Callable[[Any], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = ((name, gather(parameter)) for name, parameter in model.named_parameters())
        named = merge_parameters(model, gather=gather) if is_adapted(model) else parameters
        return ((strip_wrappers(name), tensor) for name, tensor in named)

    return _stream(read)


def gather_adapter_weights(model: Any) -> WeightStream:
    """The whole matrices of the model's adapter alone; if sharded, every process must gather all."""
    return _stream(lambda gather: gather_adapter(model, gather=gather))


def _stream(read: Callable[[Callable[[Any], torch.Tensor]], Iterator[tuple[str, torch.Tensor]]]) -> WeightStream:
    """Read once without values, for the names and shapes."""

    def shape_alone(parameter: Any) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    return WeightStream((TensorSpec.of(name, tensor) for name, tensor in read(shape_alone)), read(gather_tensor))


def checkpoint_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of a checkpoint by name: all, or of a model with adapters those that are trained."""
    parameters = {strip_wrappers(name): parameter for name, parameter in model.named_parameters()}
    if not is_adapted(model):
        return parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
