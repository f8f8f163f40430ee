"""Logprobs of the sampled ids of rows under one policy, without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray

from unbroken.routing import Routers
from unbroken.training.model.adapters import BasePolicy
from unbroken.training.model.batch import idle_batch
from unbroken.training.model.images import RowImages
from unbroken.training.model.lanes import lay_out
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.routing import lay_out_experts
from unbroken.training.model.scores import Entropy
from unbroken.types import Logprobs, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """A row under one policy; arrays are [T]."""

    logprobs: Logprobs
    """NaN where the id was not sampled."""
    entropies: Logprobs
    """In nats, of the distribution that the id is from; NaN unless asked for, and where the id was not sampled."""
    ranks: NDArray[np.int32]
    """1 + the number of ids that are more likely; 0 unless asked for, and where the id was not sampled."""

    @classmethod
    def empty(cls, length: int) -> RowScores:
        """Of a row of which nothing is known yet."""
        nothing = np.full(length, np.nan, dtype=np.float32)
        return cls(logprobs=nothing, entropies=nothing.copy(), ranks=np.zeros(length, dtype=np.int32))


@torch.no_grad()
def score_rows(
    policy: PolicyLogprobs | BasePolicy,
    samples: Sequence[TrainingSample],
    *,
    tokens_per_micro_batch: int,
    images: RowImages | None,
    device: torch.device,
    together: bool = False,
    routers: Routers | None = None,
    entropy: Entropy = Entropy.NONE,
) -> list[RowScores]:
    """The logprob of each sampled id under `policy`, and with `Entropy.RANKED` its entropy and rank.

    Experts that rows have are replayed if there are `routers`, which are those of the policy's model.

    `together`: every process calls this and makes as many passes as the one with the most, which sharded models need.
    """
    out = [RowScores.empty(len(sample.token_ids)) for sample in samples]
    passes = policy.plan_rows([sample.token_ids for sample in samples], tokens_per_micro_batch)
    num_passes = max(gather_object([len(passes)])) if together else len(passes)
    for planned in passes:
        lanes = [[(samples[i], samples[i].sampled_mask) for i in lane] for lane in planned.lanes]
        fed = lay_out(lanes, device, as_tree=planned.is_tree)
        rows = [samples[i] for i in planned.rows]
        shape = fed.token_ids_BT.shape
        pixels = None if images is None else images.inputs([row.images for row in rows], shape, device)
        experts = lay_out_experts([[samples[i] for i in lane] for lane in planned.lanes], shape, routers)
        given = (fed.position_ids_BT, entropy, experts, fed.tree, None, fed.kept)
        scores = policy(fed.token_ids_BT, fed.mask_BT, rows[0].temperature, pixels, *given)
        ends = np.cumsum([row.sampled_mask.sum() for row in rows])
        of_rows = [_split(values_N, ends) for values_N in scores[:3]]
        for k, i in enumerate(planned.rows):
            for array, of_row in zip((out[i].logprobs, out[i].entropies, out[i].ranks), of_rows, strict=True):
                if of_row is not None:
                    array[samples[i].sampled_mask] = of_row[k]
    idle = idle_batch(device)
    for _ in range(num_passes - len(passes)):
        policy(idle.token_ids_BT, idle.loss_mask_BT, 1.0)
    return out


def _split(values_N: torch.Tensor | None, ends: NDArray[np.int64]) -> list[NDArray[np.generic]] | None:
    """The values of each row, if there are any."""
    return None if values_N is None else np.split(values_N.cpu().numpy(), ends[:-1])
