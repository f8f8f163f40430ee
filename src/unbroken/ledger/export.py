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

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError
from unbroken.ledger.nodes import Origin, Path
from unbroken.ledger.numbers import MAX_FLOAT32, to_finite_float32
from unbroken.ledger.tree import TokenTree
from unbroken.types import BoolMask, TrainingSample


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
    return [
        _build_row(path, mask, temperature, by_node, policy=_find_policy(tree, path))
        for path, mask, temperature in _find_rows(tree)
    ]


def find_trained_paths(tree: TokenTree) -> list[Path]:
    """The path of each row of `export_samples`, in the same order; it may end after the row."""
    return [path for path, _, _ in _find_rows(tree)]


def _find_rows(tree: TokenTree) -> Iterator[tuple[Path, BoolMask, float]]:
    """The path, loss mask and temperature of each row."""
    num_trained = [0] * len(tree.nodes)
    for leaf in tree.leaves():
        path = tree.path(leaf)
        untrained = _mask_untrained(path, num_trained)
        for temperature in path.temperatures:
            loss_mask = untrained.copy()
            for segment in path.segments:
                if tree.nodes[segment.node].temperature != temperature:
                    loss_mask[segment.start : segment.stop] = False
            if loss_mask.any():
                yield path, loss_mask, temperature


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


def _mask_untrained(path: Path, num_trained: list[int]) -> BoolMask:
    """Mask the sampled ids that no earlier branch trains, [T].

    A path contains a prefix of each of its nodes, so the trained ids of a node are a prefix too. `num_trained` has its
    length for each node, and is updated.
    """
    mask = path.sampled_mask.copy()
    for segment in path.segments:
        num_ids = segment.stop - segment.start
        mask[segment.start : segment.start + min(num_ids, num_trained[segment.node])] = False
        num_trained[segment.node] = max(num_ids, num_trained[segment.node])
    return mask


def _find_policy(tree: TokenTree, path: Path) -> str | None:
    """The policy of a path's sampled ids: each policy of a rollout has branches of its own."""
    return next(tree.nodes[each.node].policy for each in path.segments[::-1] if each.origin is Origin.SAMPLED)


def _build_row(
    path: Path, loss_mask: BoolMask, temperature: float, by_node: _Advantages, *, policy: str | None
) -> TrainingSample:
    # A path has a prefix of each of its nodes.
    advantages = np.concatenate(
        [
            by_node[each.node][: each.stop - each.start] if each.node in by_node else np.zeros(each.stop - each.start)
            for each in path.segments
        ]
    ).astype(np.float32)
    end = int(np.flatnonzero(loss_mask)[-1]) + 1
    return TrainingSample(
        token_ids=path.token_ids[:end],
        sampled_mask=path.sampled_mask[:end],
        loss_mask=loss_mask[:end],
        rollout_logprobs=path.rollout_logprobs[:end],
        policy_versions=path.policy_versions[:end],
        advantages=np.where(loss_mask[:end], advantages[:end], np.float32(0)),
        temperature=temperature,
        images=tuple(image for image in path.images if image.offset < end),
        routed_experts=None if path.routed_experts is None else path.routed_experts[:end],
        kept_ids=None if path.kept_ids is None else path.kept_ids.cut(end),
        policy=policy,
    )
