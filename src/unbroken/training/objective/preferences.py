"""Online DPO in numbers: who is preferred to whom by their scores, and the loss of such a pair.

Two members of a group make a pair if their scores differ by more than rounding (`EQUAL_WITHIN`, as for advantages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from unbroken.errors import RewardError
from unbroken.training.objective.advantages import EQUAL_WITHIN, Rewards, check_rewards

PairFn: TypeAlias = Callable[[Rewards], Sequence[tuple[int, int]]]
"""The scores of a group [G] to pairs of its members: the preferred one, then the rejected one."""


def best_and_worst(scores: Rewards) -> list[tuple[int, int]]:
    """One pair, of the best and the worst; none where all scores are equal, which teaches nothing.

    The first of equals is taken: [1, 3, 0, 3] gives [(1, 2)].

    Raises:
        RewardError: `scores` is not a non-empty list of finite numbers.
    """
    values = check_rewards(scores)
    return _unequal([(int(values.argmax()), int(values.argmin()))], values)


def outside_in(scores: Rewards) -> list[tuple[int, int]]:
    """The best with the worst, the second best with the second worst, and so on, as long as they differ.

    Each member is in one pair at most. Worked example: of [1, 0, 1, 1, 0] the pairs are (0, 4) and (2, 1).

    Raises:
        RewardError: `scores` is not a non-empty list of finite numbers.
    """
    values = check_rewards(scores)
    order = np.argsort(-values, kind="stable").tolist()
    return _unequal(list(zip(order, reversed(order), strict=True))[: len(order) // 2], values)


def scores_of_ranking(ranking: Sequence[int]) -> list[float]:
    """The scores that say what a ranking says: `ranking` has the members' indices, best first.

    Worked example: [2, 0, 1] puts the third member first, and gives the scores [1, 0, 2].

    Raises:
        RewardError: `ranking` does not name each member once.
    """
    if sorted(ranking) != list(range(len(ranking))):
        raise RewardError(f"a ranking must name each of {len(ranking)} members once, by index, got {list(ranking)}")
    places = {member: place for place, member in enumerate(ranking)}
    return [float(len(ranking) - 1 - places[member]) for member in range(len(ranking))]


def dpo_loss(margin_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """[P] the loss of each pair: -log sigmoid(beta * margin) (DPO, arXiv:2305.18290).

    A pair's margin is (c - r) - (c_ref - r_ref): how much more than the reference the policy prefers the chosen to the
    rejected, each the sum of the logprobs of all ids that a trajectory sampled. Online, both are of the current policy
    and a score ranks them (arXiv:2402.04792).

    Worked example, beta 0.5: the policy prefers by 1, the reference by -1, so the margin is 2 and the loss
    -log sigmoid(1) = 0.3133.
    """
    return -functional.logsigmoid(beta * margin_P)


def dpo_pull(margin_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """[P] minus the derivative of `dpo_loss` by the margin: beta * sigmoid(-beta * margin).

    It is what each chosen id's logprob is pulled up by, and each rejected id's down. In the example of `dpo_loss`:
    0.5 * sigmoid(-1) = 0.1345.
    """
    return beta * torch.sigmoid(-beta * margin_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStats:
    """Sums over pairs, before the update that is made of them; means are properties."""

    num_pairs: int = 0
    num_right: int = 0
    """Pairs with a margin above 0: the policy has moved from the reference the way the scores say."""
    margin_sum: float = 0.0
    """Of beta * margin, the difference of implicit rewards."""
    loss_sum: float = 0.0

    def __add__(self, other: PairStats) -> PairStats:
        return PairStats(
            num_pairs=self.num_pairs + other.num_pairs,
            num_right=self.num_right + other.num_right,
            margin_sum=self.margin_sum + other.margin_sum,
            loss_sum=self.loss_sum + other.loss_sum,
        )

    @property
    def accuracy(self) -> float:
        """Share of pairs with a margin above 0."""
        return self.num_right / self.num_pairs

    @property
    def margin(self) -> float:
        """Mean of beta * margin."""
        return self.margin_sum / self.num_pairs


def _unequal(pairs: Sequence[tuple[int, int]], values: NDArray[np.float64]) -> list[tuple[int, int]]:
    least = EQUAL_WITHIN * np.abs(values).max()
    return [(better, worse) for better, worse in pairs if values[better] - values[worse] > least]
