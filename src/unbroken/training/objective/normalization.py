"""The weight of a loss token, by its trajectory. A trajectory that forked into several rows weighs as one.

Worked example, two trajectories with 3 and 1 loss tokens, none longer than 4. Whether the first is one row of 3 tokens,
or a row of 2 and one of 1, changes no weight:

    TOKEN     1/4  1/4  1/4 | 1/4      equal tokens: the long trajectory weighs three times as much
    SEQUENCE  1/6  1/6  1/6 | 1/2      equal trajectories: a token of a long one weighs less
    CONSTANT  1/8  1/8  1/8 | 1/8      equal tokens, and the sum grows with the trajectories' lengths
"""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import LossNormalization


def token_weight(
    normalization: LossNormalization,
    *,
    num_trajectory_tokens: int,
    num_trajectories: int,
    num_loss_tokens: int,
    max_trajectory_tokens: int | None = None,
) -> float:
    """The weight of each loss token of a trajectory with `num_trajectory_tokens` of them, over all of its rows; the
    loss is the sum of weights times token losses.

    `num_trajectories` and `num_loss_tokens` are those of the update, over all its micro batches and processes. CONSTANT
    divides by `max_trajectory_tokens`, which must be the same in all updates.

    Raises:
        InvalidInputError: a number is not positive, or with CONSTANT `max_trajectory_tokens` is missing or exceeded.
    """
    counts = {
        "num_trajectory_tokens": num_trajectory_tokens,
        "num_trajectories": num_trajectories,
        "num_loss_tokens": num_loss_tokens,
    }
    for name, count in counts.items():
        if count < 1:
            raise InvalidInputError(f"{name} must be at least 1, got {count}")
    match normalization:
        case LossNormalization.TOKEN:
            return 1 / num_loss_tokens
        case LossNormalization.SEQUENCE:
            return 1 / (num_trajectories * num_trajectory_tokens)
        case LossNormalization.CONSTANT:
            if max_trajectory_tokens is None or max_trajectory_tokens < num_trajectory_tokens:
                raise InvalidInputError(
                    "max_trajectory_tokens must be at least the loss tokens of any trajectory, got "
                    f"{max_trajectory_tokens} for one of {num_trajectory_tokens}"
                )
            return 1 / (num_trajectories * max_trajectory_tokens)
