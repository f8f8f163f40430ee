"""Attention of each node of a tree to itself and its ancestors, by the interval of each node's descendants.

    node q attends to node k    if and only if    k <= q < ends_T[k]

A GPU computes it by FlexAttention, which skips blocks of 128 x 128 nodes without such a pair, and masks nothing in
blocks of such pairs only. Which blocks these are follows from the least and the greatest end in a block of keys, so no
mask of T x T entries is made. Elsewhere the model gets one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Nodes in a block of FlexAttention; lanes of trees on a GPU are padded to a multiple."""
MIN_BLOCKS = 2
"""Attention of one block would be compiled for itself, as dimensions of size 1 are."""

IS_DYNAMIC: bool | None = None
"""`torch.compile`'s: None compiles for the first length, and at the second one for all. With True the scale would be a
symbol too, which a kernel needs as a number; False compiles for each length.
"""

_MAX_KERNELS = 32
"""They differ by dtype, heads, and which of queries, keys and values need gradients; not by the lengths."""


class MaskKind(StrEnum):
    """The attention mask of shared rows, in the form that the model's attention takes."""

    BOOLEAN = "boolean"
    """True where a node attends, [1, 1, T, T]: for SDPA."""
    ADDED = "added"
    """Zero there and the smallest number everywhere else: for attention that adds its mask to the scores."""
    BLOCKS = "blocks"
    """A `BlockMask` of FlexAttention."""


def limit_variants(number: int) -> dict[str, Any]:
    """Options of `torch.compile` for up to `number` variants, such as for other masks or numbers of lanes.

    torch's own limit is 8, after which it runs the code as it is, with a warning. Before torch 2.13 it cannot be set
    for one function, and nothing is returned.
    """
    is_known = "recompile_limit" in inspect.signature(torch.compile).parameters
    return {"recompile_limit": number} if is_known else {}


def count_filling(num_nodes: int, kind: MaskKind, num_parts: int = 1) -> int:
    """How many nodes a lane needs in addition to those of its tree, to be cut into equal parts."""
    if kind is not MaskKind.BLOCKS:
        return -num_nodes % num_parts
    least = max(MIN_BLOCKS * BLOCK, num_nodes)
    return least - num_nodes + -least % math.lcm(BLOCK, num_parts)


def make_mask(ends_T: torch.Tensor, kind: MaskKind, dtype: torch.dtype) -> torch.Tensor | BlockMask:
    """The mask of a tree, as the input `attention_mask` of a model of this dtype."""
    if kind is MaskKind.BLOCKS:
        return make_block_mask(ends_T)
    nodes_T = torch.arange(len(ends_T), device=ends_T.device)
    attends_TT = (nodes_T <= nodes_T[:, None]) & (nodes_T[:, None] < ends_T)
    if kind is MaskKind.BOOLEAN:
        return attends_TT[None, None]
    added_TT = torch.zeros(attends_TT.shape, dtype=dtype, device=ends_T.device)
    return added_TT.masked_fill_(~attends_TT, torch.finfo(dtype).min)[None, None]


def make_block_mask(ends_T: torch.Tensor) -> BlockMask:
    """The mask for a number of nodes that is a multiple of `BLOCK`, without looking at single pairs.

    A block of queries after a block of keys has a pair if one of the keys has a descendant at its first query or later,
    and nothing but pairs if each key still has one at its last. On the diagonal each node attends to itself.
    """
    ends_T = ends_T.int()
    by_block = ends_T.view(-1, BLOCK)
    starts_K = torch.arange(0, len(ends_T), BLOCK, device=ends_T.device)
    is_before = starts_K < starts_K[:, None]
    has_pair = is_before & (by_block.amax(1) > starts_K[:, None])
    is_full = is_before & (by_block.amin(1) >= starts_K[:, None] + BLOCK)
    is_partial = (has_pair & ~is_full) | (starts_K == starts_K[:, None])

    def attends(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_T[key])

    return BlockMask.from_kv_blocks(
        *_list_blocks(is_partial),
        *_list_blocks(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(len(ends_T), len(ends_T)),
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scaling: float | None
) -> torch.Tensor:
    """[1, H, T, D] queries, and keys and values of as many heads or fewer, to [1, T, H, D]."""
    groups = query.shape[1] // key.shape[1]
    is_grouped = groups > 1 and groups & (groups - 1) == 0
    if groups > 1 and not is_grouped:  # the kernel shares keys among a power of two of heads
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    compute = _get_kernel(query.device.type)
    is_usual = scaling is not None and math.isclose(scaling, query.shape[-1] ** -0.5)
    scale = None if is_usual else scaling  # as a number it would be a symbol once two models have different ones
    states_BHTD = compute(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return states_BHTD.transpose(1, 2).contiguous()


@functools.cache
def _get_kernel(device_type: str) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled once for lanes of all lengths where it is fast; else its plain mathematics.

    With `fullgraph`, what cannot be compiled is an error: it would be computed with all T x T scores in memory.
    """
    if device_type != "cuda":
        return flex_attention
    return torch.compile(flex_attention, dynamic=IS_DYNAMIC, fullgraph=True, **limit_variants(_MAX_KERNELS))


def _list_blocks(is_listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries, [1, 1, Q] the number of its blocks of keys, and [1, 1, Q, K] these first, in order."""
    order = torch.argsort(is_listed.int(), dim=-1, descending=True, stable=True)
    return is_listed.sum(-1).int()[None, None], order.int()[None, None]
