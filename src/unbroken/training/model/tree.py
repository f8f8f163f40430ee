"""Rows merged into a tree, in which ids that several rows begin with are there once.

Worked example, three rows, whose last ids are predicted and never fed:

    rows           5 6 7 8    5 6 9    5 6 7 4
    nodes          0 1 2 3                        node 0 is 5, 1 is 6, 2 is 7
    token_ids_T    5 6 7                          the last ids 8, 9 and 4 are no nodes: nothing follows them
    depths_T       0 1 2
    paths          0 1 2      0 1      0 1 2      9 is predicted from node 1, 8 and 4 both from node 2

Nodes lie depth first, so the descendants of a node follow it: node q descends from k, or is k, exactly if
k <= q < ends_T[k]. Ids that are equal, at equal positions, after equal ids have equal hidden states: so the tree is one
of ids, and knows nothing of who sampled them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.types import BoolMask, KeptIds
from unbroken.types.arrays import count_common_prefix

Ids: TypeAlias = NDArray[np.int32]
"""[T] the ids of one row."""
Nodes: TypeAlias = NDArray[np.int64]
"""Nodes of a tree, by number, or numbers for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SortedRows:
    """Rows in an order in which those with a common prefix stand together."""

    order: tuple[int, ...]
    """Which row stands at each place."""
    num_fed: tuple[int, ...]
    """At each place, ids of the row without its last one, which nothing follows."""
    num_shared: tuple[int, ...]
    """At each place, how many of these the row before begins with too; 0 at the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefixTree:
    """T nodes, depth first; several trees if the rows do not begin with one id."""

    token_ids_T: Ids
    depths_T: Nodes
    """The position of each id in its rows."""
    ends_T: Nodes
    """For each node, the number after its last descendant."""
    paths: tuple[Nodes, ...]
    """For each row, as they were given, the nodes of all ids but the last."""

    @property
    def num_shared(self) -> int:
        """Ids of rows that need no node because another row has it."""
        return sum(map(len, self.paths)) - len(self.token_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeInputs:
    """What a forward pass needs of a tree, with its ids and their positions: N tokens of a loss in U different places.

    A place is a node and an id that may follow it, kept among the same ids: rows that continue with the same id after
    the same prefix have one place, and as many tokens.
    """

    ends_T: torch.Tensor
    """int64, `_PrefixTree.ends_T`."""
    nodes_U: torch.Tensor
    """int64, the node whose hidden state predicts."""
    targets_U: torch.Tensor
    """int64, the id that is predicted."""
    places_N: torch.Tensor
    """int64, the place of each token, row by row."""

    def to(self, device: torch.device) -> TreeInputs:
        """Move all of it."""
        return TreeInputs(
            ends_T=self.ends_T.to(device),
            nodes_U=self.nodes_U.to(device),
            targets_U=self.targets_U.to(device),
            places_N=self.places_N.to(device),
        )


def _sort_rows(rows: Sequence[Ids]) -> _SortedRows:
    """Sort rows by their ids, and compare each with the one before."""
    keys = [row[:-1].astype(np.int32).tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (keys[index], index))
    fed = [rows[index][:-1] for index in order]
    shared = [0, *(count_common_prefix(a, b) for a, b in pairwise(fed))][: len(fed)]
    return _SortedRows(order=tuple(order), num_fed=tuple(map(len, fed)), num_shared=tuple(shared))


def merge_rows(rows: Sequence[Ids]) -> _PrefixTree:
    """Merge rows of at least two ids each."""
    arranged = _sort_rows(rows)
    ids, depths, ends, paths = [], [], np.zeros(sum(arranged.num_fed), dtype=np.int64), {}
    num_nodes, path = 0, np.zeros(0, dtype=np.int64)
    for index, length, shared in zip(arranged.order, arranged.num_fed, arranged.num_shared, strict=True):
        ends[path[shared:]] = num_nodes  # the branch that the row before was on ends here
        path = np.concatenate([path[:shared], np.arange(num_nodes, num_nodes + length - shared)])
        ids.append(rows[index][shared:length])
        depths.append(np.arange(shared, length))
        paths[index] = path
        num_nodes += length - shared
    ends[path] = num_nodes
    return _PrefixTree(
        token_ids_T=np.concatenate(ids).astype(np.int32),
        depths_T=np.concatenate(depths),
        ends_T=ends[:num_nodes],
        paths=tuple(paths[index] for index in range(len(rows))),
    )


def pick_nodes(
    tree: _PrefixTree,
    rows: Sequence[Ids],
    masks: Sequence[BoolMask],
    kept: KeptIds | None = None,
    edits: Nodes | None = None,
) -> tuple[TreeInputs, Nodes]:
    """Find the places of the ids where the rows' masks are true, which are never the first of a row; `kept` has what
    the sampler kept at each, and `edits` a number for how it changed the logits. Returns also the first token of each
    place.
    """
    nodes = np.concatenate([path[mask[1:]] for path, mask in zip(tree.paths, masks, strict=True)])
    targets = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)]).astype(np.int64)
    columns: list[Any] = [nodes << 32 | targets]
    if kept is not None:
        sets = [kept.token_ids[start:stop].tobytes() for start, stop in pairwise(kept.offsets.tolist())]
        numbers = {ids: number for number, ids in enumerate(dict.fromkeys(sets))}
        columns.append([numbers[ids] for ids in sets])
    if edits is not None:
        columns.append(edits)
    keys, axis = (columns[0], None) if len(columns) == 1 else (np.stack(columns, axis=1), 0)
    _, first, places = np.unique(keys, axis=axis, return_index=True, return_inverse=True)
    inputs = TreeInputs(
        ends_T=torch.from_numpy(tree.ends_T),
        nodes_U=torch.from_numpy(nodes[first]),
        targets_U=torch.from_numpy(targets[first]),
        places_N=torch.from_numpy(places.reshape(-1)),
    )
    return inputs, first


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSizes:
    """What trees cost by; [R] of R trees."""

    num_nodes: NDArray[np.int64]
    num_pairs: NDArray[np.int64]
    """Of a node with itself and with each of its ancestors."""
    num_rows: NDArray[np.int64]


CostFn: TypeAlias = Callable[[TreeSizes], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreePass:
    """The rows of one pass, by index."""

    rows: tuple[int, ...]
    num_nodes: int


def plan_trees(rows: Sequence[Ids], nodes_per_pass: int, cost_of: CostFn) -> tuple[list[_TreePass], float]:
    """Put all rows into passes of at most `nodes_per_pass` nodes, or of a single row; and what they cost.

    Rows are sorted, so that those with a common prefix stand together, and cut into runs, one for each pass. A cut
    repeats what the rows on both of its sides begin with; the cuts that cost least are found exactly, by dynamic
    programming.

        three rows of 9 ids, of which all have 4 in common and two of them 6; the last id of a row is no node

        at most 12 nodes    8 + 2 nodes | 8 nodes        rather than 8 + 4 nodes | 8, where 6 are repeated

    The largest pass comes first, so that memory runs out there or not at all.
    """
    arranged = _sort_rows(rows)
    begins, sizes, cost = _find_cuts(arranged, nodes_per_pass, cost_of)
    passes, end = [], len(rows)
    while end:
        begin = int(begins[end])
        passes.append(_TreePass(rows=arranged.order[begin:end], num_nodes=int(sizes[end])))
        end = begin
    return sorted(passes, key=lambda planned: (-planned.num_nodes, planned.rows)), cost


def _find_cuts(
    arranged: _SortedRows, nodes_per_pass: int, cost_of: CostFn
) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """For each number of rows, where the last pass of the cheapest plan for these begins, and its nodes."""
    num_rows = len(arranged.order)
    fed, shared = (np.array(lengths, dtype=np.int64) for lengths in (arranged.num_fed, arranged.num_shared))
    pairs = fed * (fed + 1) // 2
    added_nodes = np.cumsum(fed - shared)
    added_pairs = np.cumsum(pairs - shared * (shared + 1) // 2)
    cheapest = np.full(num_rows + 1, np.inf)
    cheapest[0] = 0.0
    begins, sizes = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(num_rows + 1, dtype=np.int64)
    for first in range(num_rows):
        more_nodes, more_pairs = fed[first] - added_nodes[first], pairs[first] - added_pairs[first]
        stop = max(int(np.searchsorted(added_nodes, nodes_per_pass - more_nodes, side="right")), first + 1)
        nodes = added_nodes[first:stop] + more_nodes
        costs = cheapest[first] + cost_of(
            TreeSizes(
                num_nodes=nodes, num_pairs=added_pairs[first:stop] + more_pairs, num_rows=np.arange(1, stop - first + 1)
            )
        )
        ends = 1 + first + np.flatnonzero(costs < cheapest[first + 1 : stop + 1])
        cheapest[ends], begins[ends], sizes[ends] = costs[ends - first - 1], first, nodes[ends - first - 1]
    return begins, sizes, float(cheapest[-1])
