"""LoRA adapters of PEFT: the model below them, which of them can be trained, and their weights merged into the base's.

    in memory    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight          W [32, 32]
                 base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight      A [4, 32]
                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight      B [32, 4]
    merged       model.layers.0.self_attn.q_proj.weight                                      W + scaling * B A

PEFT is imported only where a model is one of its.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unbroken.errors import InvalidInputError
from unbroken.training.model.images import PixelInputs
from unbroken.training.model.lanes import Pass

_OF_ADAPTERS = ("lora_", ".modules_to_save.")
"""In the names of all parameters that PEFT adds."""
_LEAVES_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `LoraConfig.init_lora_weights` that only make the adapter; PiSSA and others take it out of the base."""


def is_adapted(model: Any) -> bool:
    """Whether this is a `peft.PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def causal_lm(model: Any) -> Any:
    """The Hugging Face model itself, which PEFT wraps and whose layers it replaces."""
    return model.get_base_model() if is_adapted(model) else model


def check_adapters(model: Any) -> None:
    """Check that a model with adapters is one whose merged weights are known to be what was trained.

    Raises:
        InvalidInputError: another kind of adapter than LoRA on linear layers and embeddings or whole modules
            (`modules_to_save`), dropout, a quantised base, or one of two tied embeddings alone.
    """
    if not is_adapted(model):
        if getattr(model, "_hf_peft_config_loaded", False):
            raise InvalidInputError(
                f"{type(model).__name__} has adapters of its own (add_adapter): give the trainer "
                "peft.get_peft_model(model, config) instead"
            )
        return
    from peft import PeftType

    for name in model.active_adapters:
        config = model.peft_config[name]
        if config.peft_type != PeftType.LORA:
            raise InvalidInputError(f"adapter {name!r} must be a LoRA, got {config.peft_type.value}")
        for option in ("alora_invocation_tokens", "target_parameters", "trainable_token_indices"):
            if getattr(config, option, None):
                raise InvalidInputError(
                    f"adapter {name!r} must not have LoraConfig.{option}: how it merges is untested"
                )
        if config.lora_dropout > 0:
            raise InvalidInputError(
                f"adapter {name!r} must have LoraConfig.lora_dropout 0, got {config.lora_dropout}: its logprobs would "
                "not be those of the policy that sampled"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise InvalidInputError(f"{name} is {parameter.dtype}: adapters of a quantised base cannot be merged here")
    _check_tied(causal_lm(model))


def check_base(model: Any) -> None:
    """Check that the model without its adapters is the one that they were put on, whatever was trained since.

    Raises:
        InvalidInputError: there are no adapters, parameters of the base train with them, or making them changed it.
    """
    if not is_adapted(model):
        raise InvalidInputError(
            f"reference must be a model for a {type(model).__name__}: Reference.BASE is the base of a peft.PeftModel"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in _OF_ADAPTERS):
            raise InvalidInputError(
                f"{name} must not train with Reference.BASE: it is of the base, which would move along "
                "(LoraConfig.bias and requires_grad_ decide that)"
            )
    for name in model.active_adapters:
        if (start := model.peft_config[name].init_lora_weights) not in _LEAVES_BASE:
            raise InvalidInputError(
                f"adapter {name!r} must leave the base as it was with Reference.BASE, and "
                f"LoraConfig.init_lora_weights {start!r} takes a part out of its weights: give a copy as reference"
            )


class BasePolicy:
    """The logprobs of a policy with its adapters switched off; called as the policy is."""

    def __init__(self, policy: Any, model: Any) -> None:
        """`policy` is the `PolicyLogprobs` of `model`, as it is sharded."""
        self._policy = policy
        self._model = model

    def __call__(
        self,
        token_ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        temperature: float,
        pixels: PixelInputs | None = None,
        position_ids_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PolicyLogprobs.forward`."""
        with _without_adapters(self._model):
            logprobs_N: torch.Tensor = self._policy(token_ids_BT, mask_BT, temperature, pixels, position_ids_BT)
            return logprobs_N

    def plan(self, lengths: Sequence[int], tokens_per_pass: int) -> list[Pass]:
        """See `PolicyLogprobs.plan`."""
        passes: list[Pass] = self._policy.plan(lengths, tokens_per_pass)
        return passes


def merged_parameters(model: Any, *, whole: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of the base once, under the base's own name, with the active adapters merged into copies.

    One layer is held at a time, and what trains is only read. `whole` gathers a parameter that is sharded.
    """
    seen: set[int] = set()
    for name, parameter, tensor in _merged(causal_lm(model), "", whole):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, tensor


def checksum_of_frozen(model: Any) -> str:
    """A name for the contents of all parameters that do not train."""
    value = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            value = zlib.crc32(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode(), value)
            value = zlib.crc32(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), value)
    return f"{value:08x}"


def _merged(module: Any, prefix: str, whole: Any) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Names, the parameters they stand for, and the values; a tied parameter comes under each of its names."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        yield from _merged(module.modules_to_save[module.active_adapters[0]], prefix, whole)
    elif isinstance(module, BaseTunerLayer):
        originals = dict(module.get_base_layer().named_parameters())
        for name, tensor in _merged_copy(module, whole).named_parameters():
            yield prefix + name, originals[name], tensor.detach()
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield prefix + name, parameter, whole(parameter)
        for name, child in module.named_children():
            yield from _merged(child, f"{prefix}{name}.", whole)


def _merged_copy(layer: Any, whole: Any) -> Any:
    """The base layer of a copy of `layer`, with the adapters merged into it by PEFT."""
    base = {id(parameter) for parameter in layer.get_base_layer().parameters()}
    copies: dict[int, Any] = {}
    for parameter in layer.parameters():
        tensor = whole(parameter)
        # Merging adds to the base's weight in place.
        tensor = tensor.clone() if id(parameter) in base else tensor
        copies[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
    copied = copy.deepcopy(layer, copies)
    copied.merge()
    return copied.get_base_layer()


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """PEFT's own context, in which no parameter stops to ask for gradients: sharded ones must not change that."""
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def restore() -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains[name])

    try:
        with model.disable_adapter():
            restore()
            yield
    finally:
        restore()


def _check_tied(causal: Any) -> None:
    """An engine has one weight for tied embeddings, so both of them must stay as they are."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not causal.config.get_text_config().tie_word_embeddings:
        return
    for part in (causal.get_input_embeddings(), causal.get_output_embeddings()):
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise InvalidInputError(
                f"adapters must leave {type(causal).__name__}'s embeddings alone, for they are tied: merged, input and "
                "output embeddings would differ, and an engine has one weight for both. Take them out of "
                "LoraConfig.target_modules and modules_to_save, or untie them before"
            )
