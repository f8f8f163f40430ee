"""From rows to tensors for one forward pass and its loss.

Only ids and the loss mask are padded. Values per loss token (N) stay flat, row by row, so neither NaN nor padding
enters the loss. Worked example, two rows:

    token_ids 5 6 7 8      loss_mask 0 0 1 1    rollout_logprobs nan nan -.1 -.2
    token_ids 5 9          loss_mask 0 1        rollout_logprobs nan -.3

    token_ids_BT [[5 6 7 8], [5 9 0 0]]    loss_mask_BT [[0 0 1 1], [0 1 0 0]]    rollout_logprobs_N [-.1 -.2 -.3]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.routing import Routers
from unbroken.training.model.lanes import PADDING_ID, lay_out
from unbroken.training.model.routing import lay_out_experts
from unbroken.training.model.scores import KeptTokens, Targets
from unbroken.training.model.tree import TreeInputs
from unbroken.training.teachers import TeacherLogprobs
from unbroken.types import BoolMask, ImageSpan, Logprobs, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTargets:
    """What is scored at the L ids of a row's loss mask in place of these ids, and what the loss gets for each."""

    ids: NDArray[np.int64]
    """[L], or [L, K] with the same K in all rows of a call."""
    trained: BoolMask
    """[L], where the loss depends on the logprobs."""
    values: Mapping[str, NDArray[np.float32]]
    """[L] or [L, K] by name, with the same names in all rows of a call."""
    is_beside: bool = False
    """Whether [L, K] ids are scored beside those of the row instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A row with logprobs computed before the step's first update: [T], NaN where the id was not sampled."""

    sample: TrainingSample
    old_logprobs: Logprobs
    reference_logprobs: Logprobs | None = None
    """None without a reference."""
    teacher: TeacherLogprobs | None = None
    """None if no teacher scores the row."""
    targets: RowTargets | None = None
    """None: the row's own ids."""

    @property
    def num_loss_tokens(self) -> int:
        """Number of ids in the loss mask."""
        return int(self.sample.loss_mask.sum())

    @property
    def teacher_gaps(self) -> NDArray[np.float64]:
        """[L] old logprob - teacher's logprob of each loss token, the estimate k1 of KL(policy || teacher)."""
        assert self.teacher is not None, "asked for only of rows that a teacher has scored"
        own, other = (
            values[self.sample.loss_mask].astype(np.float64) for values in (self.old_logprobs, self.teacher.logprobs)
        )
        gaps: NDArray[np.float64] = own - other
        return gaps

    @property
    def num_top(self) -> int:
        """How many of its most likely ids a teacher gave at each sampled id."""
        return 0 if self.teacher is None or self.teacher.top is None else self.teacher.top.token_ids.shape[1]

    @property
    def teacher_masses(self) -> NDArray[np.float64]:
        """[L] the probability of the teacher's most likely ids together at each loss token; [0] if it gave none."""
        assert self.teacher is not None, "asked for only of rows that a teacher has scored"
        if self.teacher.top is None:
            return np.zeros(0)
        in_loss = self.sample.loss_mask[self.sample.sampled_mask]
        masses: NDArray[np.float64] = np.exp(self.teacher.top.logprobs[in_loss].astype(np.float64)).sum(-1)
        return masses


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySums:
    """Sums over the loss tokens of all rows of one trajectory, which a forward pass may not see together."""

    num_tokens: int
    log_ratio: float | None
    """Of logprob - old logprob, by the weights before the update; None unless the loss asks for it."""
    sampler_gap: float
    """Of old logprob - rollout logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one forward pass: B lanes of T ids, N loss tokens in all."""

    token_ids_BT: torch.Tensor
    """int64, right-padded."""
    loss_mask_BT: torch.Tensor
    """bool, false on padding; N entries are true, or with a `tree` the nodes that predict a loss token."""
    rollout_logprobs_N: torch.Tensor
    """float32."""
    old_logprobs_N: torch.Tensor
    """float32, the divisor of the ratio."""
    advantages_N: torch.Tensor
    """float32."""
    weights_N: torch.Tensor
    """float32, the factor of each token's loss."""
    versions_N: torch.Tensor
    """int32, the policy version that sampled the id."""
    num_ids: int
    """The rest of B * T is padding."""
    num_row_tokens: tuple[int, ...]
    """Loss tokens of each row; N in all."""
    trajectories: tuple[TrajectorySums | None, ...] = ()
    """For each row that is only a part of a trajectory, the trajectory's sums, if the loss asks for them; None for a
    row that is a whole trajectory. Empty: all rows are."""
    reference_logprobs_N: torch.Tensor | None = None
    """float32; None without a reference."""
    position_ids_BT: torch.Tensor | None = None
    """int64, from 0 in each row; None if each lane has one row."""
    tree: TreeInputs | None = None
    """If the rows are merged into a tree, in one lane."""
    num_shared: int = 0
    """Ids of the rows that are not fed because another row has them."""
    images: tuple[tuple[ImageSpan, ...], ...] = ()
    """Those of each row, which then has its own lane. Pixels are loaded per pass: those of a step may not fit."""
    experts_BTLK: torch.Tensor | None = None
    """int16, on the CPU: recorded experts to replay (`lay_out_experts`)."""
    counted_BT: torch.Tensor | None = None
    """bool: ids whose experts are counted (`count_choices`): all but the last of each row, which decides nothing."""
    kept: KeptTokens | None = None
    """What the sampler did at each loss token, or at the places of the tree; None if nothing."""
    targets: Targets | None = None
    """Scored in place of the rows' own ids; None: these."""
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Those of `RowTargets` for all rows."""

    @property
    def num_loss_tokens(self) -> int:
        """N."""
        return len(self.advantages_N)

    @property
    def num_padding(self) -> int:
        """Number of padding ids."""
        return self.token_ids_BT.numel() - self.num_ids


def collate(
    lanes: Sequence[Sequence[ScoredRow]],
    token_weights: Sequence[float],
    device: torch.device,
    *,
    trajectories: Sequence[TrajectorySums | None] = (),
    routers: Routers | None = None,
    as_tree: bool = False,
    counts_choices: bool = False,
) -> Batch:
    """Put the rows of all lanes into one batch on `device`; `token_weights` has one number per row, and so has
    `trajectories`, unless it is empty. With `routers`, the experts that rows have are replayed. The rows of one lane
    can be merged `as_tree`. `counts_choices` says whether the choices of experts are counted.
    """
    samples = [[row.sample for row in lane] for lane in lanes]
    rows = list(chain.from_iterable(lanes))
    fed = lay_out([[(sample, sample.loss_mask) for sample in lane] for lane in samples], device, as_tree=as_tree)
    targets, values = _collate_targets(rows, device)
    return Batch(
        token_ids_BT=fed.token_ids_BT,
        loss_mask_BT=fed.mask_BT,
        position_ids_BT=fed.position_ids_BT,
        num_ids=fed.num_ids,
        tree=fed.tree,
        num_shared=fed.num_shared,
        num_row_tokens=tuple(row.num_loss_tokens for row in rows),
        trajectories=tuple(trajectories),
        images=tuple(row.sample.images for row in rows),
        experts_BTLK=lay_out_experts(samples, fed.token_ids_BT.shape, routers),
        counted_BT=_mark_deciding(samples, device) if counts_choices else None,
        kept=fed.kept,
        targets=targets,
        values=values,
        **_collate_loss_tokens(rows, token_weights, device),
    )


class _LossTokens(TypedDict):
    """Fields of `Batch` with a number for each loss token."""

    rollout_logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    versions_N: torch.Tensor
    reference_logprobs_N: torch.Tensor | None


def _collate_loss_tokens(
    rows: Sequence[ScoredRow], token_weights: Sequence[float], device: torch.device
) -> _LossTokens:
    counts = [row.num_loss_tokens for row in rows]
    weights_N = np.repeat(np.asarray(token_weights, dtype=np.float32), counts)
    references = [row.reference_logprobs for row in rows if row.reference_logprobs is not None]

    def pick(arrays: Iterable[NDArray[Any]]) -> torch.Tensor:
        """Of one array [T] for each row the numbers of the loss tokens."""
        picked = [array[row.sample.loss_mask] for array, row in zip(arrays, rows, strict=True)]
        return _concatenate(picked, device)

    return {
        "rollout_logprobs_N": pick(row.sample.rollout_logprobs for row in rows),
        "old_logprobs_N": pick(row.old_logprobs for row in rows),
        "advantages_N": pick(row.sample.advantages for row in rows),
        "weights_N": _concatenate([weights_N], device),
        "versions_N": pick(row.sample.policy_versions for row in rows),
        "reference_logprobs_N": pick(references) if references else None,
    }


def _mark_deciding(lanes: Sequence[Sequence[TrainingSample]], device: torch.device) -> torch.Tensor:
    """[B, T] true for all ids but the last of each row, which decides no other and is often not fed."""
    marked = [
        [(sample, np.arange(len(sample.token_ids)) < len(sample.token_ids) - 1) for sample in lane] for lane in lanes
    ]
    return lay_out(marked, device).mask_BT


def _collate_targets(rows: Sequence[ScoredRow], device: torch.device) -> tuple[Targets | None, dict[str, torch.Tensor]]:
    """What all rows score in place of their own ids, and the values for the loss; none of them or all of them do."""
    found = [row.targets for row in rows if row.targets is not None]
    if not found:
        return None, {}
    ids_N = _concatenate([targets.ids for targets in found], device)
    trained_N = _concatenate([targets.trained for targets in found], device)
    values = {name: _concatenate([targets.values[name] for targets in found], device) for name in found[0].values}
    return Targets(ids_N, trained_N, found[0].is_beside), values


def idle_batch(device: torch.device) -> Batch:
    """Two ids and no loss token, with zero gradients, for a process without rows while another has some."""
    none_N = torch.zeros(0, device=device)
    return Batch(
        token_ids_BT=torch.full((1, 2), PADDING_ID, device=device),
        loss_mask_BT=torch.zeros(1, 2, dtype=torch.bool, device=device),
        rollout_logprobs_N=none_N,
        old_logprobs_N=none_N,
        advantages_N=none_N,
        weights_N=none_N,
        versions_N=none_N.int(),
        num_ids=2,
        num_row_tokens=(0,),
    )


def _concatenate(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
