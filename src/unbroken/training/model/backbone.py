"""Hidden states of a text model's decoder, or of an image-text model's decoder and vision tower together.

Shapes: B rows, T ids, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import rms_norm

from unbroken.errors import InvalidInputError
from unbroken.images.embeddings import replace_sampled_placeholders
from unbroken.images.processor import name_token_types
from unbroken.routing import Routers
from unbroken.training.model.images import PixelInputs
from unbroken.training.model.sequence import SequenceGroup
from unbroken.training.model.varlen import RowBorders, no_masks


def hidden_states(
    model: Any,
    token_ids_BT: torch.Tensor,
    pixels: PixelInputs | None = None,
    position_ids_BT: torch.Tensor | None = None,
    *,
    by_rows: bool = False,
    mask: Any | None = None,
    router_logits: list[torch.Tensor] | None = None,
    sequence: SequenceGroup | None = None,
) -> torch.Tensor:
    """[B, T, D] the last hidden states, to which the output embeddings are applied; with a `sequence`, those of this
    process's part of the ids, [B, T / P, D].

    Only the nodes of a tree have a `mask` (`tree`): lanes are padded on the right, and a causal model does not look
    ahead. Positions keep rows that share a lane apart; with `by_rows`, which is for one lane, their borders do
    (`varlen`). Without positions, a model
    with special ones for images (Qwen's three per id) makes them from `mm_token_type_ids`, as it does when it samples.
    `router_logits` gets those of each layer with experts.

    FSDP2 has a vision tower, and input embeddings that are tied, in the group of `model` itself, which it gathers in
    `model.forward`. Here it is gathered whether there are images or not, so that no process waits for another one, and
    stays so until the end of the backward pass, or `reshard`.
    """
    if isinstance(model, FSDPModule) and has_tower(model):
        model.unshard()
    last_hidden = partial(_last_hidden, model, router_logits)
    if sequence is not None:
        with no_masks():
            return last_hidden(**_split_inputs(sequence, token_ids_BT, position_ids_BT, by_rows=by_rows, mask=mask))
    if mask is not None:
        return last_hidden(input_ids=token_ids_BT, position_ids=position_ids_BT, attention_mask=mask)
    if position_ids_BT is not None and by_rows:
        with no_masks():
            return last_hidden(
                input_ids=token_ids_BT, position_ids=position_ids_BT, **RowBorders.of(position_ids_BT).as_inputs()
            )
    if position_ids_BT is not None:
        return last_hidden(input_ids=token_ids_BT, position_ids=position_ids_BT)
    if pixels is None:
        return last_hidden(input_ids=token_ids_BT)
    with replace_sampled_placeholders(model, token_ids_BT, pixels.token_types_BT) as input_ids_BT:
        return last_hidden(input_ids=input_ids_BT, **accepted_inputs(model, pixels))


def enable_checkpointing(model: Any, *, routers: Routers | None = None) -> None:
    """Make the model recompute activations in the backward pass, with the experts that `routers` replayed.

    Raises:
        InvalidInputError: the model does not support that.
    """
    arguments: dict[str, Any] = {"use_reentrant": False}
    if routers is not None:
        arguments["context_fn"] = routers.make_checkpoint_contexts
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # its name in transformers 5.23
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"{type(model).__name__} must support TrainerConfig.gradient_checkpointing: {error}. Set it to False"
        ) from error


def has_tower(model: Any) -> bool:
    """Whether the model has more than text, such as a vision tower."""
    return model.config.get_text_config() is not model.config


def get_backbone(model: Any) -> Any:
    """The module that computes the last hidden states.

    In an image-text model it is not the text decoder (`get_decoder`), but the module around it that also has the vision
    tower and inserts image features into the text embeddings. The output embeddings are outside of both.
    """
    decoder = model.get_decoder()
    if not has_tower(model):
        return decoder
    head = model.get_output_embeddings()
    for module in model.modules():
        children = list(module.children())
        if any(child is decoder for child in children):
            return decoder if any(child is head for child in children) else module
    return decoder


def accepted_inputs(model: Any, pixels: PixelInputs) -> dict[str, torch.Tensor]:
    """The processor's tensors, and the types of ids, that the model's forward has parameters for.

    Raises `InvalidInputError` if it takes none of the tensors.
    """
    names = set(inspect.signature(get_backbone(model).forward).parameters)
    inputs = {name: tensor for name, tensor in pixels.tensors.items() if name in names}
    if not inputs:
        raise InvalidInputError(
            f"{type(model).__name__} must take at least one of the image inputs {sorted(pixels.tensors)}, but its "
            "forward has no such parameter: give the trainer the processor of this model"
        )
    types = name_token_types(pixels.token_types_BT)
    return inputs | {name: tensor for name, tensor in types.items() if name in names}


def parameters_beside_text(model: Any) -> list[nn.Parameter]:
    """Trainable parameters outside of decoder and output embeddings, which a pass without images does not use.

    Each pass asks for them: in a model of text the modules of the decoder are not visited.
    """
    parts = (model.get_decoder(), model.get_output_embeddings())
    outside = {id(parameter) for parameter in _parameters_outside(model, parts) if parameter.requires_grad}
    if not outside:
        return []
    outside -= {id(parameter) for part in parts for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) in outside]


def _parameters_outside(module: nn.Module, parts: tuple[nn.Module, ...]) -> Iterator[nn.Parameter]:
    if any(module is part for part in parts):
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _parameters_outside(child, parts)


def _split_inputs(
    sequence: SequenceGroup,
    token_ids_BT: torch.Tensor,
    position_ids_BT: torch.Tensor | None,
    *,
    by_rows: bool,
    mask: Any | None,
) -> dict[str, Any]:
    """The own part of the ids and their positions, and masks or borders of whole lanes, padded."""
    missing = -token_ids_BT.shape[1] % sequence.size
    if position_ids_BT is None:
        ids_T = torch.arange(token_ids_BT.shape[1] + missing, device=token_ids_BT.device)
        positions_BT = ids_T.expand(len(token_ids_BT), -1)
    else:
        filling = torch.arange(1, 1 + missing, device=token_ids_BT.device)
        positions_BT = torch.cat([position_ids_BT, position_ids_BT[:, -1:] + filling], 1)
    inputs: dict[str, Any] = {"exchange": sequence.attend}
    inputs |= {"input_ids": sequence.split(token_ids_BT), "position_ids": sequence.split(positions_BT)}
    if mask is not None:
        inputs["attention_mask"] = mask
    elif by_rows and position_ids_BT is not None:
        inputs |= RowBorders.of(positions_BT).as_inputs()
    elif position_ids_BT is not None:
        inputs["attention_mask"] = _make_row_mask(positions_BT)
    return inputs


def _last_hidden(model: Any, router_logits: list[torch.Tensor] | None, **inputs: Any) -> torch.Tensor:
    if router_logits is not None:
        inputs["output_router_logits"] = True
    outputs = get_backbone(model)(**inputs, use_cache=False)
    if router_logits is not None:
        router_logits.extend(outputs.get("router_logits") or ())
    hidden_BTD: torch.Tensor = outputs.last_hidden_state
    return hidden_BTD


_PROBE_ROWS = 4
_NORM_TOLERANCE = 1e-5
"""Maximum difference, relative to the largest result; both are float32."""


def fuse_norms(model: nn.Module) -> int:
    """Replace the model's RMS norms by one kernel each, and return how many; again is harmless.

    transformers writes a norm as a power, a mean, a root and two products, and autograd keeps what each of them needs.
    Where a GPU computes under autocast, a norm is replaced by one kernel, but only if it is
    x / sqrt(mean(x^2) + eps) * weight in float32, as a probe on a few numbers shows; Gemma's, which adds 1 to its
    weight, stays.
    """
    found = [module for module in model.modules() if _is_plain_norm(module)]
    for module in found:
        module.forward = MethodType(_forward_norm, module)
    return len(found)


def round_norms(model: nn.Module) -> None:
    """Let the same norms compute in one kernel in the type of their input, with or without autocast."""
    for module in filter(_is_plain_norm, model.modules()):
        module.forward = MethodType(_forward_rounded_norm, module)


def _forward_rounded_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, tuple(self.weight.shape), self.weight, _get_eps(self))


def _forward_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not (hidden_states.is_cuda and torch.is_autocast_enabled("cuda")):
        own: torch.Tensor = type(self).forward(self, hidden_states)
        return own
    return compute_norm(self, hidden_states)


def compute_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The norm in one kernel, in float32, which is what the model's own code returns for float32 hidden states."""
    return rms_norm(hidden_states.float(), tuple(module.weight.shape), module.weight.float(), _get_eps(module))


def _get_eps(module: Any) -> float | None:
    """Llama's norms and those written after them have `variance_epsilon`, Gemma's and torch's `eps`."""
    own = vars(module)
    eps = own.get("variance_epsilon", own.get("eps"))
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def _is_plain_norm(module: Any) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if not type(module).__name__.endswith("RMSNorm") or weight is None:
        return False
    if weight.dim() != 1 or weight.dtype not in (torch.float32, torch.bfloat16) or _get_eps(module) is None:
        return False
    generator = torch.Generator().manual_seed(0)
    probe = 3 * torch.randn(_PROBE_ROWS, len(weight), generator=generator).to(weight.device)
    try:
        expected = type(module).forward(module, probe)
    except Exception:  # a forward with other arguments
        return False
    off = (compute_norm(module, probe) - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return bool(off <= _NORM_TOLERANCE)


def _make_row_mask(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, T] true where an id attends: to itself and those before it in its row."""
    rows_BT = (position_ids_BT == 0).cumsum(1)
    return ((rows_BT[:, :, None] == rows_BT[:, None]).tril())[:, None]
