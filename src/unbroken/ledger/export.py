"""Export a token tree as training rows.

The example of `tree`, continued: two branches share the prompt `[1, 2]` and the sampled 3.

    branch to (3, 2)   token_ids     1  2  3  4  5  6  7  4
                       sampled_mask  -  -  x  x  -  -  x  x
                       loss_mask     -  -  x  x  -  -  x  x     its row trains 3 4 7 4
    branch to (5, 1)   token_ids     1  2  3  9  8
                       sampled_mask  -  -  x  -  x
                       loss_mask     -  -  -  -  x              its row trains 8: the shared 3 is trained above

Both rows have the trajectory's advantage, or that of the id or its turn, where their loss mask is true, otherwise zero.
A branch whose turns were sampled at several temperatures gives a row for each, which trains the ids of that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError
from unbroken.ledger.nodes import Origin, Path
from unbroken.ledger.numbers import MAX_FLOAT32, to_finite_float32
from unbroken.ledger.tree import TokenTree
from unbroken.types import TrainingSample


def export_samples(
    tree: TokenTree, advantage: float | Mapping[int, float | NDArray[np.float64]]
) -> list[TrainingSample]:
    """Export one row per leaf that has sampled ids that no other leaf has, in the order in which the leaves were added.

    If these ids have several temperatures there is a row for each, in the order in which the temperatures appear.

    `advantage` is one number for all ids; or, by the number of each node that was sampled, one for all of its ids or
    one for each.

    A sampled id that several branches share is in the loss of the first only. A leaf with no ids left to train (an
    unanswered prompt, a branch that ends inside an earlier one) gives no row. A row ends with its last trained id:
    later ids would only cost time.

    Raises:
        InvalidInputError: an advantage is not a finite number, that of a sampled node is missing, or a node has more or
            fewer than ids.
    """
    by_node = _check_advantages(tree, advantage)
    return [_add_advantages(path, row, by_node) for path, row in tree.rows]


_Advantages: TypeAlias = Mapping[int, NDArray[np.float32]]
"""Of the ids of each sampled node, [its ids]."""


def _check_advantages(tree: TokenTree, advantage: float | Mapping[int, float | NDArray[np.float64]]) -> _Advantages:
    numbers = [number for number, node in enumerate(tree.nodes) if node.origin is Origin.SAMPLED]
    if not isinstance(advantage, Mapping):
        advantage = dict.fromkeys(numbers, advantage)
        names = dict.fromkeys(numbers, "advantage")
    else:
        names = {number: f"advantage[{number}]" for number in numbers}
    if missing := [number for number in numbers if number not in advantage]:
        raise InvalidInputError(f"advantage must have a number for each sampled node, but has none for {missing}")
    return {
        number: _expand(advantage[number], len(tree.nodes[number].token_ids), name=names[number]) for number in numbers
    }


def _expand(value: float | NDArray[np.float64], num_ids: int, *, name: str) -> NDArray[np.float32]:
    """The advantage of each of a node's ids."""
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return np.full(num_ids, to_finite_float32(value, name=name), dtype=np.float32)
    if value.shape != (num_ids,):
        raise InvalidInputError(f"{name} must be one number, or one for each of {num_ids} ids, got {value.shape}")
    if not (np.abs(value) <= MAX_FLOAT32).all():
        raise InvalidInputError(f"{name} must be finite in float32, got {value}")
    return value.astype(np.float32)


def _add_advantages(path: Path, row: TrainingSample, by_node: _Advantages) -> TrainingSample:
    # A path has a prefix of each of its nodes.
    advantages = np.concatenate(
        [
            by_node[each.node][: each.stop - each.start] if each.node in by_node else np.zeros(each.stop - each.start)
            for each in path.segments
        ]
    ).astype(np.float32)
    return replace(row, advantages=np.where(row.loss_mask, advantages[: len(row.token_ids)], np.float32(0)))
