"""Recorded experts of rows as the input of a forward pass (`unbroken.routing` replays them).

Two rows in lanes of 4 ids, of which the first knows the experts of 2 ids and the second those of none:

    ids        5 6 7 .      experts    a b - -      `-` is LIVE: the router chooses
               8 9 . .                 - - - -

Shapes: B lanes, T ids, L layers, K experts of an id in a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from unbroken.errors import InvalidInputError
from unbroken.routing import LIVE, Routers
from unbroken.training.sums import Sums
from unbroken.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats(Sums):
    """What was replayed in the passes of an update, or of several."""

    num_ids: int = 0
    """Ids that were computed, without padding."""
    num_live_ids: int = 0
    """Those without recorded experts, which took those that the routers chose."""
    num_replayed: int = 0
    """Recorded experts, counted in ids times layers."""
    num_different: int = 0
    """Those whose routers chose others now."""

    @property
    def different_share(self) -> float | None:
        """Share of recorded experts, in ids times layers, that the routers would not choose now; None without any."""
        return self.num_different / self.num_replayed if self.num_replayed else None

    @property
    def live_share(self) -> float | None:
        """Share of ids without recorded experts; None without ids."""
        return self.num_live_ids / self.num_ids if self.num_ids else None


def count_choices(router_logits: Sequence[torch.Tensor], counted_N: torch.Tensor, top_k: int) -> torch.Tensor:
    """[2, E] how often each of E experts is among the best `top_k` of a counted id in a layer, and the sum of its
    probabilities there, with their gradient. `router_logits` are [N, E], one for each layer.
    """
    layers = []
    for logits_NE in router_logits:
        probabilities_NE = logits_NE[counted_N].float().softmax(-1)
        chosen_NK = probabilities_NE.topk(top_k).indices
        times_E = torch.bincount(chosen_NK.flatten(), minlength=logits_NE.shape[1])
        layers.append(torch.stack([times_E.float(), probabilities_NE.sum(0)]))
    return torch.stack(layers).sum(0)


def balance_loss(choices_2E: torch.Tensor, probabilities_E: torch.Tensor) -> torch.Tensor:
    """The part that some passes have in the load-balancing loss of the Switch Transformer (arXiv:2101.03961) as
    transformers computes it: E times the sum over experts of the mean number of choices and the mean probability.

    `choices_2E` are those of all passes. Worked example, two layers of one id and E 2, choices 2 0 and probabilities
    0.7 + 0.6 and 0.3 + 0.4: the means are 1 0 and 0.65 0.35, and the loss is 2 * 0.65 = 1.3.
    """
    loss: torch.Tensor = len(probabilities_E) * (choices_2E[0] * probabilities_E).sum() / choices_2E[1].sum() ** 2
    return loss


def lay_out_experts(
    lanes: Sequence[Sequence[TrainingSample]], shape: Sequence[int], routers: Routers | None
) -> torch.Tensor | None:
    """[B, T, L, K] int16, on the CPU: the experts of the rows of each lane, `LIVE` where none are known.

    `shape` is [B, T] of the pass. None if no row has any, or nothing is replayed (`routers` is None).
    """
    if routers is None or not any(row.routed_experts is not None for lane in lanes for row in lane):
        return None
    experts = np.full((*shape[:2], routers.num_layers, routers.top_k), LIVE, dtype=np.int16)
    for number, lane in enumerate(lanes):
        start = 0
        for row in lane:
            if row.routed_experts is not None:
                experts[number, start : start + len(row.routed_experts)] = row.routed_experts
            start += len(row.token_ids)
    return torch.from_numpy(experts)


def count_ids(rows: Sequence[TrainingSample]) -> RoutingStats:
    """Count the ids of rows that are computed, and those without experts. The last id of a row decides nothing."""
    num_ids = sum(len(row.token_ids) - 1 for row in rows)
    num_known = sum(
        min(len(row.routed_experts), len(row.token_ids) - 1) for row in rows if row.routed_experts is not None
    )
    return RoutingStats(num_ids=num_ids, num_live_ids=num_ids - num_known)


def flatten_experts(
    experts_BTLK: torch.Tensor | None, shape: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """[N, L, K] on `device`, for the N = B x T ids of `shape` that the model gets, which may be fewer or more."""
    if experts_BTLK is None:
        return None
    cut_BTLK = experts_BTLK[: shape[0], : shape[1]]
    missing = shape[0] - cut_BTLK.shape[0], shape[1] - cut_BTLK.shape[1]
    full_BTLK = pad(cut_BTLK, (0, 0, 0, 0, 0, missing[1], 0, missing[0]), value=LIVE)
    return full_BTLK.flatten(0, 1).to(device)


def check_experts(rows: Sequence[TrainingSample], routers: Routers) -> None:
    """Check that recorded experts are of this model.

    Raises:
        InvalidInputError: a row's have another number of layers or experts per id, or one that the model has not.
    """
    shape = routers.num_layers, routers.top_k
    for k, row in enumerate(rows):
        experts = row.routed_experts
        if experts is None:
            continue
        if experts.shape[1:] != shape or (experts.size and experts.max() >= routers.num_experts):
            raise InvalidInputError(
                f"routed_experts of row {k} must have {shape[0]} layers with {shape[1]} of {routers.num_experts} "
                f"experts for each id, got {experts.shape[1]} layers with {experts.shape[2]} experts up to "
                f"{experts.max(initial=0)}: another model sampled it"
            )


def check_same_experts(reference: Routers, policy: Routers) -> None:
    """Check that experts of the policy can be replayed in the reference; raises `InvalidInputError`."""
    names = ("layers", "num_layers", "num_experts", "top_k")
    different = [name for name in names if getattr(reference, name) != getattr(policy, name)]
    if different:
        raise InvalidInputError(
            "reference must have the experts of the model with routing_replay, got "
            + ", ".join(f"{name} {getattr(reference, name)} for {getattr(policy, name)}" for name in different)
        )
