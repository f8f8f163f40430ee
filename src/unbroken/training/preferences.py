"""Online DPO: pairs of completions of one prompt, ranked by a score, and the loss over policy and reference."""

from __future__ import annotations

import torch
from torch.nn import functional

from unbroken.errors import InvalidInputError
from unbroken.training.advantages import Rewards, check_rewards


def best_and_worst(scores: Rewards) -> tuple[int, int] | None:
    """The members of a group to prefer and to reject; None where all scores are equal, which teaches nothing.

    The first of equals is taken: [1, 3, 0, 3] gives (1, 2).

    Raises:
        RewardError: `scores` is not a non-empty list of finite numbers.
    """
    values = check_rewards(scores)
    best, worst = int(values.argmax()), int(values.argmin())
    return None if values[best] == values[worst] else (best, worst)


def dpo_loss(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    reference_chosen_P: torch.Tensor,
    reference_rejected_P: torch.Tensor,
    *,
    beta: float = 0.1,
) -> torch.Tensor:
    """[P] the loss of each pair: -log sigmoid(beta ((c - r) - (c_ref - r_ref))) (DPO, arXiv:2305.18290).

    The arguments are [P] sums of the logprobs of a completion's sampled ids. Online, both completions are of the
    current policy and a score ranks them (arXiv:2402.04792).

    Worked example, beta 0.5: the policy prefers by 1, the reference by -1, so the margin is 1 and the loss
    -log sigmoid(1) = 0.3133.

    Raises:
        InvalidInputError: the shapes differ, or beta is not positive.
    """
    shapes = {tuple(t.shape) for t in (chosen_P, rejected_P, reference_chosen_P, reference_rejected_P)}
    if len(shapes) != 1 or chosen_P.ndim != 1:
        raise InvalidInputError(f"the four sums of logprobs must share one shape [P], got {sorted(shapes)}")
    if not beta > 0:
        raise InvalidInputError(f"beta must be > 0, got {beta}")
    margin_P = (chosen_P - rejected_P) - (reference_chosen_P - reference_rejected_P)
    return -functional.logsigmoid(beta * margin_P)
