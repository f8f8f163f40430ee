"""Samples ids from logits, with their exact logprobs, for a whole batch of rows at once.

Order of the stages: what changes logits (`LogitEdits`), temperature, min-p, top-k, top-p (vLLM's order). A stage that
no row uses costs nothing.

Shapes: B rows, V vocabulary, R the rows that use a stage.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.logit_edits import LogitEdits
from unbroken.types import SamplingParams, TokenIds

ParamsArray: TypeAlias = NDArray[Any]
"""[B] of `PARAMS_DTYPE`: the sampling parameters of many rows, one array per field."""

PARAMS_DTYPE = np.dtype(
    [
        ("greedy", np.bool_),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
    ],
    align=True,  # torch reads the fields in place
)


def pack_params(params: SamplingParams) -> tuple[bool | int | float, ...]:
    """Make one row of a `ParamsArray`. A greedy row is scored at temperature 1 over the whole vocabulary."""
    if params.temperature == 0:
        return (True, 1.0, 0, 1.0, 0.0)
    return (False, params.temperature, params.top_k, params.top_p, params.min_p)


def compute_logprobs(logits_BV: torch.Tensor, params_B: ParamsArray, edits: LogitEdits | None = None) -> torch.Tensor:
    """Return [B, V] float32 logprobs of the distribution that each row is drawn from; -inf where it is cut."""
    if edits is not None:
        logits_BV = edits.apply(logits_BV.float())
    if (params_B["temperature"] != 1).any():
        logits_BV = logits_BV.float()
        logits_BV = logits_BV / _column(params_B["temperature"], like=logits_BV)
    cut = (params_B["top_k"] > 0) | (params_B["top_p"] < 1) | (params_B["min_p"] > 0)
    if cut.any():
        rows = torch.from_numpy(np.flatnonzero(cut)).to(logits_BV.device)
        logits_BV = logits_BV.index_copy(0, rows, _truncate(logits_BV[rows], params_B[cut]))
    return torch.log_softmax(logits_BV, dim=-1, dtype=torch.float32)


def draw(
    logprobs_BV: torch.Tensor, params_B: ParamsArray, uniforms_B: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Pick one id per row, and its logprob; greedy rows take the most likely id.

    One uniform number in [0, 1) per row goes through the inverse of the cumulative distribution, summed in float64: the
    same number and distribution give the same id in any batch. An id of probability 0 is never drawn.
    The logprob is not finite where the row's logits are not.
    """
    greedy = params_B["greedy"]
    if greedy.all():
        ids_B = logprobs_BV.argmax(dim=-1)
    else:
        cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        total_B1 = cumulative_BV[:, -1:]
        target_B1 = _column(uniforms_B, like=cumulative_BV) * total_B1
        # The product may round up to the total, above which there is no id.
        target_B1 = torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
        ids_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
        ids_B = ids_B.clamp_max(logprobs_BV.shape[-1] - 1)  # NaN sorts above all numbers
        if greedy.any():
            ids_B = torch.where(torch.from_numpy(greedy).to(ids_B.device), logprobs_BV.argmax(dim=-1), ids_B)
    chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    return ids_B.cpu().numpy(), chosen_B.cpu().numpy()


def find_kept(logprobs_RV: torch.Tensor) -> list[TokenIds]:
    """The ids of each row that are possible, ascending; none where all are."""
    kept_RV = logprobs_RV != float("-inf")
    sizes = kept_RV.sum(dim=-1)
    kept_RV[sizes == kept_RV.shape[-1]] = False
    rows, ids = kept_RV.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(logprobs_RV)).cpu().numpy()
    return np.split(ids.cpu().numpy().astype(np.int32), np.cumsum(counts)[:-1])


def find_top(logprobs_BV: torch.Tensor, number: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return [B, number] the greatest logprobs of each row, greatest first, and [B, number] their ids."""
    top_logprobs, top_ids = logprobs_BV.topk(number, dim=-1)
    return top_logprobs.cpu().numpy(), top_ids.cpu().numpy().astype(np.int32)


def _truncate(logits_RV: torch.Tensor, params_R: ParamsArray) -> torch.Tensor:
    """Set to -inf what min-p, top-k and top-p cut; equal logits keep the smaller id first."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    probs_RV = torch.softmax(sorted_RV.double(), dim=-1)
    keep_RV = probs_RV >= _column(params_R["min_p"], like=probs_RV) * probs_RV[:, :1]

    vocab_size = logits_RV.shape[-1]
    top_k = np.where(params_R["top_k"] > 0, params_R["top_k"], vocab_size)
    keep_RV &= torch.arange(vocab_size, device=logits_RV.device) < torch.from_numpy(top_k).to(logits_RV.device)[:, None]

    kept_RV = torch.where(keep_RV, probs_RV, 0.0)
    kept_RV = kept_RV / kept_RV.sum(dim=-1, keepdim=True)
    mass_before_RV = kept_RV.cumsum(dim=-1) - kept_RV
    top_p_R1 = _column(params_R["top_p"], like=probs_RV)
    # At 1 nothing is cut: rounding could otherwise reach the whole mass before the last ids.
    keep_RV &= (mass_before_RV < top_p_R1) | (top_p_R1 >= 1)

    cut_RV = torch.ones_like(keep_RV).scatter(1, order_RV, ~keep_RV)
    return logits_RV.masked_fill(cut_RV, float("-inf"))


def _column(values: NDArray[Any], *, like: torch.Tensor) -> torch.Tensor:
    """Return values as [B, 1] on the device and in the dtype of `like`."""
    return torch.from_numpy(values).to(device=like.device, dtype=like.dtype)[:, None]
