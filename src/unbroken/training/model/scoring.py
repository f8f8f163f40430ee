"""Logprobs of the sampled ids of rows under one policy, without gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from accelerate.utils import gather_object

from unbroken.routing import Routers
from unbroken.training.model.adapters import BasePolicy
from unbroken.training.model.batch import idle_batch
from unbroken.training.model.images import RowImages
from unbroken.training.model.lanes import lay_out
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.routing import lay_out_experts
from unbroken.training.model.scores import Entropy
from unbroken.types import Logprobs, TrainingSample


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
) -> list[Logprobs]:
    """One array [T] per row: the logprob of each sampled id under `policy`, NaN elsewhere.

    Experts that rows have are replayed if there are `routers`, which are those of the policy's model.

    `together`: every process calls this and makes as many passes as the one with the most, which sharded models need.
    """
    out: list[Logprobs] = [np.full(len(sample.token_ids), np.nan, dtype=np.float32) for sample in samples]
    passes = policy.plan_rows([sample.token_ids for sample in samples], tokens_per_micro_batch)
    num_passes = max(gather_object([len(passes)])) if together else len(passes)
    for planned in passes:
        lanes = [[(samples[i], samples[i].sampled_mask) for i in lane] for lane in planned.lanes]
        fed = lay_out(lanes, device, as_tree=planned.is_tree)
        rows = [samples[i] for i in planned.rows]
        shape = fed.token_ids_BT.shape
        pixels = None if images is None else images.inputs([row.images for row in rows], shape, device)
        experts = lay_out_experts([[samples[i] for i in lane] for lane in planned.lanes], shape, routers)
        given = (fed.position_ids_BT, Entropy.NONE, experts, fed.tree)
        scores = policy(fed.token_ids_BT, fed.mask_BT, rows[0].temperature, pixels, *given)
        ends = np.cumsum([row.sampled_mask.sum() for row in rows])
        for i, of_row in zip(planned.rows, np.split(scores.logprobs_N.cpu().numpy(), ends[:-1]), strict=True):
            out[i][samples[i].sampled_mask] = of_row
    idle = idle_batch(device)
    for _ in range(num_passes - len(passes)):
        policy(idle.token_ids_BT, idle.loss_mask_BT, 1.0)
    return out
