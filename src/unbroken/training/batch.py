"""From rows to tensors: which rows share a forward pass, and what it needs of them.

Only ids and the loss mask are padded. What is known per loss token (N of them) stays flat, row by row, so no NaN and no
filler ever becomes a number. Worked example, two rows:

    token_ids 5 6 7 8      loss_mask 0 0 1 1    rollout_logprobs nan nan -.1 -.2
    token_ids 5 9          loss_mask 0 1        rollout_logprobs nan -.3

    token_ids_BT [[5 6 7 8], [5 9 0 0]]    loss_mask_BT [[0 0 1 1], [0 1 0 0]]    rollout_logprobs_N [-.1 -.2 -.3]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.types import BoolMask, ImageSpan, Logprobs, TrainingSample

PADDING_ID = 0
"""Any id will do: nothing before it can see it, and no loss is taken on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A row and what was computed of it before the step's first update: arrays [T], numbers where an id was sampled."""

    sample: TrainingSample
    old_logprobs: Logprobs
    reference_logprobs: Logprobs | None = None
    """None where no reference is computed."""

    @property
    def num_loss_tokens(self) -> int:
        """Ids in the loss mask."""
        return int(self.sample.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one forward pass: B rows, T ids in the longest, N loss tokens in all."""

    token_ids_BT: torch.Tensor
    """int64, right-padded."""
    loss_mask_BT: torch.Tensor
    """bool, false on padding; N entries are true."""
    rollout_logprobs_N: torch.Tensor
    """float32."""
    old_logprobs_N: torch.Tensor
    """float32, what the ratio is taken against."""
    advantages_N: torch.Tensor
    """float32."""
    normalization_N: torch.Tensor
    """float32, what each token's loss is multiplied by for the length of its row and the rows of the update."""
    versions_N: torch.Tensor
    """int32, the policy version that sampled the id."""
    num_row_tokens: tuple[int, ...]
    """Loss tokens of each row; N in all."""
    reference_logprobs_N: torch.Tensor | None = None
    """float32; None where no reference is computed."""
    images: tuple[tuple[ImageSpan, ...], ...] = ()
    """Of each row. Their pixels are loaded for the pass alone, since those of a whole step may not fit."""

    @property
    def num_loss_tokens(self) -> int:
        """N."""
        return len(self.advantages_N)


def collate(rows: Sequence[ScoredRow], token_weights: Sequence[float], device: torch.device) -> Batch:
    """Put rows, each with the weight of its loss tokens, into one batch on `device`."""
    samples = [row.sample for row in rows]
    masks = [sample.loss_mask for sample in samples]
    counts = [int(mask.sum()) for mask in masks]
    token_ids_BT, loss_mask_BT = pad_rows(samples, masks, device)
    references = [row.reference_logprobs[row.sample.loss_mask] for row in rows if row.reference_logprobs is not None]
    return Batch(
        token_ids_BT=token_ids_BT,
        loss_mask_BT=loss_mask_BT,
        rollout_logprobs_N=_flat([sample.rollout_logprobs[sample.loss_mask] for sample in samples], device),
        old_logprobs_N=_flat([row.old_logprobs[mask] for row, mask in zip(rows, masks, strict=True)], device),
        advantages_N=_flat([sample.advantages[sample.loss_mask] for sample in samples], device),
        normalization_N=_flat([np.repeat(np.asarray(token_weights, dtype=np.float32), counts)], device),
        versions_N=_flat([sample.policy_versions[sample.loss_mask] for sample in samples], device),
        num_row_tokens=tuple(counts),
        reference_logprobs_N=_flat(references, device) if references else None,
        images=tuple(sample.images for sample in samples),
    )


def idle_batch(device: torch.device) -> Batch:
    """Two ids and no loss token: what a process computes while another still has rows. Its gradients are zero."""
    none_N = torch.zeros(0, device=device)
    return Batch(
        token_ids_BT=torch.full((1, 2), PADDING_ID, device=device),
        loss_mask_BT=torch.zeros(1, 2, dtype=torch.bool, device=device),
        rollout_logprobs_N=none_N,
        old_logprobs_N=none_N,
        advantages_N=none_N,
        normalization_N=none_N,
        versions_N=none_N.int(),
        num_row_tokens=(0,),
    )


def pad_rows(
    samples: Sequence[TrainingSample], masks: Sequence[BoolMask], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' ids (int64) and one mask per row (bool), both [B, T]."""
    shape = len(samples), max(len(sample.token_ids) for sample in samples)
    token_ids = np.full(shape, PADDING_ID, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample.token_ids)] = sample.token_ids
        mask[row, : len(sample.token_ids)] = masks[row]
    return torch.from_numpy(token_ids).to(device), torch.from_numpy(mask).to(device)


def micro_batches(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Put row indices of like length together, so that rows times the longest one stays within the budget.

    Longest first, so that memory runs out at once or not at all. A row longer than the budget is alone in its batch.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens_per_micro_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _flat(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
