"""A transformers model computes what its config says, of each row as if it were alone, and as vLLM does.

Rotary factors of `longrope` and `dynamic` depend in transformers on the longest position of a pass, so also on the rows
beside. vLLM chooses them once, by its context (`max_model_len`), and so does `fix_rotary`:

    longrope, original length 64    context of 64: short factors for all rows    from 65 on: long factors for all rows
    dynamic                         the config's own base, for rows of up to `max_position_embeddings`

Attention by `sdpa` leaves out soft caps and sinks without a word: `choose_attention` finds the models that have them.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from unbroken.errors import InvalidInputError

_LONG_ROW, _SHORT_ROW = 72, 5
_LONGROPE, _DYNAMIC = ("short longrope", "long longrope"), "NTK of a fixed length"
"""The `rope_type` of modules whose factors are fixed: transformers changes those of its own names in each pass."""
_LEFT_OUT = {"softcap": "soft cap (attn_logit_softcapping)", "s_aux": "sinks"}
"""What models ask of their attention and `sdpa` does not do, by the name of the argument."""
_PROBE = "unbroken_probe"
_logger = logging.getLogger(__name__)


def fix_rotary(model: Any, context_length: int) -> None:
    """Make the model's rotary factors those of an engine with this context, for rows of all lengths. Idempotent.

    Raises:
        InvalidInputError: the factors are fixed for another context already; or their kind cannot be fixed, or has none
            for the whole context.
    """
    for module in model.modules():
        kinds = _find_kinds(module)
        for layer, kind in kinds.items():
            if kind in (*_LONGROPE, "longrope"):
                kinds[layer] = _fix_longrope(module, layer, context_length)
            elif kind == _DYNAMIC or "dynamic" in kind:
                kinds[layer] = _fix_dynamic(module, layer, kind, context_length)
        if "" in kinds:
            module.rope_type = kinds[""]


@torch.no_grad()
def find_length_dependence(model: Any) -> str | None:
    """How the model computes a row differently in a pass with a longer one; None if it does not.

    The other row has more ids and, in a model of text that takes positions, the last positions of the model's context.
    """
    kinds = {kind for module in model.modules() for kind in _find_kinds(module).values()}
    if found := sorted(kind for kind in kinds if kind == "longrope" or "dynamic" in kind):
        return (
            f"its rope_type is {found[0]}. Call `unbroken.exactness.fix_rotary(model, context_length)` first, with the "
            "context_length of the engine that samples"
        )
    config, embeddings = model.config.get_text_config(), model.get_input_embeddings().weight
    places = torch.arange(length := choose_long_length(model), device=embeddings.device)
    ids = (places + 1).remainder(len(embeddings))
    short = ids[:_SHORT_ROW].flip(0)
    takes_positions = config is model.config and "position_ids" in inspect.signature(model.forward).parameters
    last = (getattr(config, "max_position_embeddings", None) or length) - length
    positions = {"position_ids": torch.stack([places, places + last])} if takes_positions else {}
    alone = model(input_ids=short[None], use_cache=False).logits[0]
    both = torch.stack([pad(short, (0, length - len(short))), ids])
    beside = model(input_ids=both, use_cache=False, **positions).logits[0, : len(short)]
    off = float((beside.float() - alone.float()).abs().max() / alone.float().abs().max())
    return None if off <= get_tolerance(model.dtype, alone.dtype) else f"the logits are off by {off:.2g} of the largest"


@torch.no_grad()
def choose_attention(model: Any) -> None:
    """Let a model that has `sdpa` attend by `eager` if `sdpa` would leave out a part of its config, and log it."""
    if model.config.get_text_config()._attn_implementation != "sdpa":
        return
    asked: set[str] = set()

    def record(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        asked.update(name for name in _LEFT_OUT if options.get(name) is not None)
        return sdpa_attention_forward(*arguments, **options)  # type: ignore[no-any-return]

    AttentionInterface.register(_PROBE, record)
    AttentionMaskInterface.register(_PROBE, sdpa_mask)
    with attending_by(model, _PROBE):
        model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.get_input_embeddings().weight.device))
    if asked:
        model.set_attn_implementation("eager")
        names = " and ".join(_LEFT_OUT[name] for name in sorted(asked))
        _logger.warning("%s attends by eager, because sdpa would leave out its %s", type(model).__name__, names)


@contextmanager
def attending_by(model: Any, implementation: str) -> Iterator[None]:
    """Let the model of text attend by another implementation during the block."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def choose_long_length(model: Any) -> int:
    """Ids of the long row of a probe, next to which it shows what depends on the length of a pass."""
    return min(_LONG_ROW, getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONG_ROW)


def get_tolerance(*dtypes: torch.dtype) -> float:
    """Maximum difference of two ways to compute the same, relative to the largest: operations are rounded otherwise.

    Of several types, such as a model's and that of its logits, the coarsest counts: FSDP2 may compute in bfloat16 with
    weights that it keeps in float32.
    """
    return max(1e-3, *(8 * torch.finfo(dtype).eps for dtype in dtypes))


def _find_kinds(module: Any) -> dict[str, str]:
    """The `rope_type` of a rotary module, by kind of layer ("" where it has one for all); empty for other modules."""
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {"": kinds} if isinstance(kinds, str) else {}


def _fix_longrope(module: Any, layer: str, context_length: int) -> str:
    config, kind = module.config, _find_kinds(module)[layer]
    parameters = config.rope_parameters[layer] if layer else config.rope_parameters
    original = parameters["original_max_position_embeddings"]
    fixed = _LONGROPE[context_length > original]
    if kind in _LONGROPE and kind != fixed:
        raise InvalidInputError(
            f"the context_length of all engines of a model must lie on one side of {original} (its longrope's "
            f"original_max_position_embeddings), got {context_length}, and its factors are those of a {kind}"
        )
    scaling = parameters.get("short_mscale" if fixed == _LONGROPE[0] else "long_mscale")
    if scaling is None:
        scale = max(config.max_position_embeddings / original, 1.0)
        scaling = math.sqrt(1 + math.log(scale) / math.log(original))
    prefix = f"{layer}_" if layer else ""
    device = getattr(module, f"{prefix}inv_freq").device
    factors, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=context_length, layer_type=layer or None)
    setattr(module, f"{prefix}inv_freq", factors)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return fixed


def _fix_dynamic(module: Any, layer: str, kind: str, context_length: int) -> str:
    longest, prefix = module.config.max_position_embeddings, f"{layer}_" if layer else ""
    if kind not in (_DYNAMIC, "dynamic"):
        raise InvalidInputError(f"rope_type must not depend on the length of a pass, got {kind}: vLLM has none of it")
    if context_length > longest:
        raise InvalidInputError(
            f"context_length must be at most {longest} (max_position_embeddings) for a model with dynamic NTK, because "
            f"vLLM has no positions beyond, got {context_length}: start the engine with --max-model-len {longest}"
        )
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
    return _DYNAMIC
