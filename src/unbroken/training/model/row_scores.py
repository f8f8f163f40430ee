"""Logprobs of the sampled ids of rows under one policy, without gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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
from unbroken.training.model.scores import Entropy, TokenScores
from unbroken.types import BoolMask, Logprobs, TopLogprobs, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """A row under one policy; arrays are [T]."""

    logprobs: Logprobs
    """NaN where the id was not sampled."""
    entropies: Logprobs
    """In nats, of the distribution that the id is from; NaN unless asked for, and where the id was not sampled."""
    ranks: NDArray[np.int32]
    """1 + the number of ids that are more likely; 0 unless asked for, and where the id was not sampled."""
    top: TopLogprobs | None = None
    """[S, K] at each sampled id; None unless the policy is a teacher that gives them (`PolicyLogprobs.num_top`)."""

    @classmethod
    def empty(cls, length: int) -> RowScores:
        """Of a row of which nothing is known yet."""
        nothing = np.full(length, np.nan, dtype=np.float32)
        return cls(logprobs=nothing, entropies=nothing.copy(), ranks=np.zeros(length, dtype=np.int32))

    def fill(self, places: BoolMask, values: Iterable[NDArray[np.generic] | None]) -> None:
        """Write what a pass found at these places: logprobs, entropies and ranks; None is left as it is."""
        for array, found in zip((self.logprobs, self.entropies, self.ranks), values, strict=True):
            if found is not None:
                array[places] = found


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
        lanes = planned.pick(samples)
        fed = lay_out(
            [[(sample, sample.sampled_mask) for sample in lane] for lane in lanes], device, as_tree=planned.is_tree
        )
        rows, shape = list(chain.from_iterable(lanes)), fed.token_ids_BT.shape
        pixels = None if images is None else images.inputs([row.images for row in rows], shape, device)
        given = (fed.position_ids_BT, entropy, lay_out_experts(lanes, shape, routers), fed.tree, None, fed.kept)
        scores = policy(fed.token_ids_BT, fed.mask_BT, rows[0].temperature, pixels, *given)
        for i, of_row, top in zip(planned.rows, _split_by_row(scores, rows), _split_top(scores, rows), strict=True):
            out[i].fill(samples[i].sampled_mask, of_row)
            out[i] = replace(out[i], top=top)
    _make_idle_passes(policy, num_passes - len(passes), device)
    return out


def _make_idle_passes(policy: PolicyLogprobs | BasePolicy, number: int, device: torch.device) -> None:
    idle = idle_batch(device)
    for _ in range(number):
        policy(idle.token_ids_BT, idle.loss_mask_BT, 1.0)


def _split_by_row(
    scores: TokenScores, rows: Sequence[TrainingSample]
) -> Iterator[tuple[NDArray[np.generic] | None, ...]]:
    """Logprobs, entropies and ranks of each row; None where they were not asked for."""
    ends = _find_ends(rows)
    nothing: list[NDArray[np.generic] | None] = [None] * len(rows)
    return zip(
        *(nothing if values_N is None else np.split(values_N.cpu().numpy(), ends[:-1]) for values_N in scores[:3]),
        strict=True,
    )


def _split_top(scores: TokenScores, rows: Sequence[TrainingSample]) -> list[TopLogprobs | None]:
    """The most likely ids at each sampled id of each row; None where they were not asked for."""
    if scores.top_ids_N is None or scores.beside_N is None:
        return [None] * len(rows)
    parts = (np.split(each.cpu().numpy(), _find_ends(rows)[:-1]) for each in (scores.top_ids_N, scores.beside_N))
    return [TopLogprobs(token_ids=ids, logprobs=logprobs) for ids, logprobs in zip(*parts, strict=True)]


def _find_ends(rows: Sequence[TrainingSample]) -> NDArray[np.int64]:
    return np.cumsum([row.sampled_mask.sum() for row in rows])
