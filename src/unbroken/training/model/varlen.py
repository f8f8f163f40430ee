"""Attention within each of the rows of one lane, by their lengths: no padding, no mask, no id of another row.

    lane  a a a b b c     positions 0 1 2 0 1 0     starts 0 3 5 6, longest 3

A GPU computes it in half precision by `torch.nn.attention.varlen` (FlashAttention), about as fast as a causal kernel
over rows of one length. Elsewhere each row is attended by itself: slow, and there for tests.

A model gets it under its own name (`IMPLEMENTATION`), which is SDPA wherever no borders are given: in padded
passes, in copies of the model, and in `generate`. Given a `BlockMask`, it is FlexAttention (`tree_attention`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unbroken.training.model.tree_attention import attend

IMPLEMENTATION = "sdpa_by_rows"
_CHANGE_SCORES = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What a model may ask of its attention in addition to the scaled products of queries and keys."""
_HALF = (torch.bfloat16, torch.float16)
_without_mask: ContextVar[bool] = ContextVar("_without_mask", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBorders:
    """Where the rows of one lane begin."""

    starts_R: torch.Tensor
    """int32, the first id of each row, and the end of the lane."""
    longest: int
    """Ids of the longest row."""

    @staticmethod
    def of(position_ids_BT: torch.Tensor) -> RowBorders:
        """Find the rows of the one lane, whose positions begin at 0 in each."""
        positions_T = position_ids_BT[0]
        firsts = torch.nonzero(positions_T == 0)[:, 0]
        starts_R = torch.cat([firsts, firsts.new_tensor([len(positions_T)])])
        return RowBorders(starts_R=starts_R.int(), longest=int(starts_R.diff().max()))

    def as_inputs(self) -> dict[str, Any]:
        """The inputs of a model's forward, which passes them to its attention, by transformers' names."""
        return {
            "cu_seq_lens_q": self.starts_R,
            "cu_seq_lens_k": self.starts_R,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def can_attend_by_rows(model: Any) -> bool:
    """Whether the kernel takes this model, where it is and under the present autocast; not whether it is right."""
    if model.config.get_text_config()._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return False
    parameter = next(model.parameters())
    if parameter.device.type != "cuda" or torch.cuda.get_device_capability(parameter.device) < (8, 0):
        return False
    return _get_dtype(parameter) in _HALF


def register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _make_mask)


@contextmanager
def attention_by_rows(model: Any) -> Iterator[Callable[[], None]]:
    """Make a model that uses SDPA attend within rows where it gets `RowBorders`.

    The block gets a function to call if it shall stay so afterwards.
    """
    register_attention()
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, IMPLEMENTATION
    kept: list[bool] = []
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            config._attn_implementation = before


@contextmanager
def no_masks() -> Iterator[None]:
    """Let the model make no masks, which attention by rows does not need."""
    token = _without_mask.set(True)
    try:
        yield
    finally:
        _without_mask.reset(token)


def _make_mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    return None if _without_mask.get() else sdpa_mask(*arguments, **options)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    exchange: Callable[..., tuple[torch.Tensor, None]] | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """[B, H, T, D] queries, keys and values to [B, T, H, D]; by `SequenceGroup.attend` if that is the `exchange`."""
    if exchange is not None:
        rest |= {"scaling": scaling, "cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
        query, key, value = (states.to(_get_dtype(states)) for states in (query, key, value))
        return exchange(_attend, module, query, key, value, attention_mask, sliding_window=sliding_window, **rest)
    if isinstance(attention_mask, BlockMask):
        rest["sliding_window"] = sliding_window
        if unknown := sorted(name for name in _CHANGE_SCORES if rest.get(name) is not None):
            raise ValueError(f"FlexAttention over a tree has no {', '.join(unknown)}")
        dtype = _get_dtype(query)
        return attend(query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, scaling), None
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **rest
        )
    q_THD, k_THD, v_THD = (states[0].transpose(0, 1) for states in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    if query.device.type == "cuda":
        states_THD = _attend_on_gpu(q_THD, k_THD, v_THD, cu_seq_lens_q, max_length_q, scaling, window)
    else:
        states_THD = _attend_one_by_one(q_THD, k_THD, v_THD, cu_seq_lens_q, scaling, window)
    return states_THD[None], None


def _attend_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_R: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    query, key, value = (states.to(_get_dtype(states)) for states in (query, key, value))
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    states = varlen_attn(
        query, key, value, starts_R, starts_R, longest, longest, scale=scaling, window_size=window, **options
    )
    assert isinstance(states, torch.Tensor), "no auxiliary output was asked for"
    return states


def _attend_one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_R: torch.Tensor,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    lengths = starts_R.diff().tolist()
    rows = []
    for states in zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in states)
        ids = torch.arange(q.shape[2], device=q.device)
        back = ids[:, None] - ids[None]
        mask = (back >= 0) if window[0] < 0 else (back >= 0) & (back <= window[0])
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
        rows.append(attended[0].transpose(0, 1))
    return torch.cat(rows)


def _get_dtype(tensor: torch.Tensor) -> torch.dtype:
    """In which attention is computed."""
    is_cast = tensor.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return torch.get_autocast_dtype("cuda") if is_cast else tensor.dtype
