"""Which rows share a pass as one tree.

Rows are sorted, so that those with a common prefix stand together, and cut into runs, one for each pass. A cut repeats
what the rows on both of its sides begin with; the cuts that cost least are found exactly, by dynamic programming.

    three rows of 9 ids, of which all have 4 in common and two of them 6; the last id of a row is no node

    at most 12 nodes    8 + 2 nodes | 8 nodes        rather than 8 + 4 nodes | 8, where 6 are repeated
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.training.model.prefixes.tree import Ids, SortedRows, sort_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSizes:
    """What trees cost by; [R] of R trees."""

    num_nodes: NDArray[np.int64]
    num_pairs: NDArray[np.int64]
    """Of a node with itself and with each of its ancestors."""
    num_rows: NDArray[np.int64]


CostFn: TypeAlias = Callable[[TreeSizes], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePass:
    """The rows of one pass, by index."""

    rows: tuple[int, ...]
    num_nodes: int


def plan_trees(rows: Sequence[Ids], nodes_per_pass: int, cost_of: CostFn) -> tuple[list[TreePass], float]:
    """Put all rows into passes of at most `nodes_per_pass` nodes, or of a single row; and what they cost.

    The largest pass comes first, so that memory runs out there or not at all.
    """
    arranged = sort_rows(rows)
    begins, sizes, cost = _find_cuts(arranged, nodes_per_pass, cost_of)
    passes, end = [], len(rows)
    while end:
        begin = int(begins[end])
        passes.append(TreePass(rows=arranged.order[begin:end], num_nodes=int(sizes[end])))
        end = begin
    return sorted(passes, key=lambda planned: (-planned.num_nodes, planned.rows)), cost


def _find_cuts(
    arranged: SortedRows, nodes_per_pass: int, cost_of: CostFn
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
                num_nodes=nodes,
                num_pairs=added_pairs[first:stop] + more_pairs,
                num_rows=np.arange(1, stop - first + 1),
            )
        )
        ends = 1 + first + np.flatnonzero(costs < cheapest[first + 1 : stop + 1])
        cheapest[ends], begins[ends], sizes[ends] = costs[ends - first - 1], first, nodes[ends - first - 1]
    return begins, sizes, float(cheapest[-1])
