"""A model's layers compiled by `torch.compile`: fewer kernels, and less kept for the backward pass.

transformers writes rotary embeddings, gates, norms, casts and sums as a kernel each, which take half of a pass of a
small model on a GPU (docs/lab-notes). Each block of the decoder is compiled by itself: all of them share what is
compiled for the first, and the rest of the model runs as it is. Rows of all lengths share it too. A pass of one lane,
one without gradients and one with the borders of rows have their own variants, each compiled when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from unbroken.errors import InvalidInputError
from unbroken.exactness import choose_probe_ids
from unbroken.training.model.sharding import reshard
from unbroken.training.model.tree_attention import limit_variants

BACKEND = "inductor"
MAX_VARIANTS = 32
"""Of one block's code."""
TOLERANCE = 1e-4
"""Maximum difference, relative to the largest logprob; in smaller dtypes than float32 it is at least their rounding."""
PROBE_SHAPES = ((2, 5), (1, 7))
"""Lanes and ids of those that are compared: several lanes, and one."""


def compile_blocks(policy: Any) -> None:
    """Compile the blocks of a `PolicyLogprobs` in place, where it is trained.

    All processes call it, under the autocast of its passes. It compares logprobs before and after, and so compiles at
    once, which takes up to a minute.

    Raises:
        InvalidInputError: the model does not name its blocks, compiling fails, or logprobs are no longer the same.
    """
    name = type(policy.causal).__name__
    blocks = list(_find_blocks(policy.causal))
    if not blocks:
        raise InvalidInputError(f"{name} must name its blocks (_no_split_modules) for TrainerConfig.compile")
    before = _probe_logprobs(policy)
    for block in blocks:
        block.compile(backend=BACKEND, dynamic=True, **limit_variants(MAX_VARIANTS))
    try:
        after = _probe_logprobs(policy)
    except Exception as error:  # a compiler may raise anything
        reason = str(error).partition("\n\n")[0]  # hints about torch's variables follow
        raise InvalidInputError(
            f"{name} cannot be compiled, {type(error).__name__}: {reason}. Set TrainerConfig.compile to False"
        ) from error
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(after, before, strict=True))
    tolerance = max(TOLERANCE, 8 * torch.finfo(_get_precision(policy.causal.device)).eps)
    if not off <= tolerance:
        raise InvalidInputError(
            f"{name} gives other logprobs once it is compiled, by {off:.2g} of the largest (at most {tolerance:.2g} is "
            "rounding): set TrainerConfig.compile to False"
        )


def _find_blocks(causal: Any) -> Iterator[nn.Module]:
    """The blocks of the decoder; those of a vision tower run once for each image, and are left alone."""
    names = set(causal._no_split_modules or ())
    for module in causal.get_decoder().modules():
        if any(kind.__name__ in names for kind in type(module).__mro__):  # FSDP2 derives a class from the model's
            yield module


@torch.no_grad()
def _probe_logprobs(policy: Any) -> Sequence[torch.Tensor]:
    """Logprobs of a few ids."""
    device = policy.causal.device
    found = []
    for shape in PROBE_SHAPES:
        token_ids_BT = choose_probe_ids(shape[0] * shape[1], policy.vocab_size, device).view(shape)
        mask_BT = torch.ones_like(token_ids_BT, dtype=torch.bool)
        mask_BT[:, 0] = False
        found.append(policy(token_ids_BT, mask_BT, 1.0).logprobs_N)
    reshard(policy)
    return found


def _get_precision(device: torch.device) -> torch.dtype:
    """In which layers are computed."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
