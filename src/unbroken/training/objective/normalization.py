"""The weight of a loss token, by its row.

Worked example, two rows with 3 and 1 loss tokens, none longer than 4:

    TOKEN     1/4  1/4  1/4 | 1/4      equal tokens: the long row weighs three times as much
    SEQUENCE  1/6  1/6  1/6 | 1/2      equal rows: a token of a long row weighs less
    CONSTANT  1/8  1/8  1/8 | 1/8      equal tokens, and the sum grows with the rows' lengths
"""

from __future__ import annotations

from unbroken.errors import InvalidInputError
from unbroken.training.config import LossNormalization


def token_weight(
    normalization: LossNormalization,
    *,
    num_row_tokens: int,
    num_rows: int,
    num_loss_tokens: int,
    max_row_tokens: int | None = None,
) -> float:
    """The weight of each loss token of a row with `num_row_tokens`; the loss is the sum of weights times token losses.

    `num_rows` and `num_loss_tokens` are those of the update, over all its micro batches and processes. CONSTANT divides
    by `max_row_tokens`, which must be the same in all updates.

    Raises:
        InvalidInputError: a number is not positive, or with CONSTANT `max_row_tokens` is missing or exceeded.
    """
    counts = {"num_row_tokens": num_row_tokens, "num_rows": num_rows, "num_loss_tokens": num_loss_tokens}
    for name, count in counts.items():
        if count < 1:
            raise InvalidInputError(f"{name} must be at least 1, got {count}")
    match normalization:
        case LossNormalization.TOKEN:
            return 1 / num_loss_tokens
        case LossNormalization.SEQUENCE:
            return 1 / (num_rows * num_row_tokens)
        case LossNormalization.CONSTANT:
            if max_row_tokens is None or max_row_tokens < num_row_tokens:
                raise InvalidInputError(
                    f"max_row_tokens must be at least the loss tokens of any row, got {max_row_tokens} for a row of "
                    f"{num_row_tokens}"
                )
            return 1 / (num_rows * max_row_tokens)
