"""Grouped-query attention for one id per row, without repeating keys and values for each query head.

With a mask, the `sdpa` attention of transformers copies all keys and values of the batch once per group of query heads
and layer. For a single query position the heads of a group can take the place of positions, and nothing is copied. The
copies took most of a decoding step on a CPU. Registered with transformers through its public `AttentionInterface`; all
other steps, and the masks, use transformers' own `sdpa`.

Shapes: R rows, H query heads, G key-value heads, D head size, L positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "unbroken_grouped_sdpa"
"""The name for `set_attn_implementation`."""


def use_grouped_sdpa(model: Any) -> None:
    """Switch a model from `sdpa` to the grouped attention. Idempotent."""
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
    model.set_attn_implementation(GROUPED_SDPA)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Keep cuDNN out of attention: it compiles a plan for each new shape, and here every step has a new one.

    On an H200 a plan took 15 to 60 ms, more than the rest of a step of a 0.6B model. The switch is global: other
    threads do without cuDNN meanwhile, and compute the same.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # an untyped corner of torch
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of `query` [R, H, T, D] over `key` and `value` [R, G, L, D], as [R, T, H, D]."""
    num_rows, num_heads, num_positions, head_dim = query.shape
    num_groups = key.shape[1]
    if num_positions > 1 or num_groups == num_heads or attention_mask is None or attention_mask.shape[1] > 1:
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return attended
    grouped = query.reshape(num_rows, num_groups, num_heads // num_groups, head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output.reshape(num_rows, 1, num_heads, value.shape[-1]), None
