"""Which rows share a pass as one tree.

Rows are sorted, so that those with a common prefix stand together, and cut into runs, one for each pass. A cut repeats
what the rows on both of its sides begin with; the cuts that cost least are found exactly, by dynamic programming.

    three rows of 9 ids, of which all have 4 in common and two of them 6; the last id of a row is no node

    at most 12 nodes    8 + 2 nodes | 8 nodes        rather than 8 + 4 nodes | 8, where 6 are repeated
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unbroken.training.model.prefixes.tree import Ids, SortedRows, sort_rows


@dataclass(frozen=True, slots=True)
class TreeSize:
    """What a tree costs by."""

    num_nodes: int = 0
    num_pairs: int = 0
    """Of a node with itself and with each of its ancestors."""
    num_rows: int = 0

    @property
    def is_row(self) -> bool:
        """Whether it is no tree but one row."""
        return self.num_rows == 1

    def add(self, length: int, shared: int) -> TreeSize:
        """The size with one more row of `length` ids, of which the first `shared` are there."""
        pairs = (length * (length + 1) - shared * (shared + 1)) // 2
        return TreeSize(self.num_nodes + length - shared, self.num_pairs + pairs, self.num_rows + 1)


CostFn: TypeAlias = Callable[[TreeSize], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePass:
    """The rows of one pass, by index."""

    rows: tuple[int, ...]
    size: TreeSize


def plan_trees(rows: Sequence[Ids], nodes_per_pass: int, cost_of: CostFn) -> list[TreePass]:
    """Put all rows into passes of at most `nodes_per_pass` nodes, or of a single row.

    The largest pass comes first, so that memory runs out there or not at all.
    """
    arranged = sort_rows(rows)
    begins, sizes = _find_cuts(arranged, nodes_per_pass, cost_of)
    passes, end = [], len(rows)
    while end:
        passes.append(TreePass(rows=arranged.order[begins[end] : end], size=sizes[end]))
        end = begins[end]
    return sorted(passes, key=lambda planned: (-planned.size.num_nodes, planned.rows))


def _find_cuts(arranged: SortedRows, nodes_per_pass: int, cost_of: CostFn) -> tuple[list[int], list[TreeSize]]:
    """For each number of rows, where the last pass of the cheapest plan for these begins, and the size of this pass."""
    num_rows = len(arranged.order)
    cheapest, begins = [0.0] + [math.inf] * num_rows, [0] * (num_rows + 1)
    sizes = [TreeSize()] * (num_rows + 1)
    for first in range(num_rows):
        size = TreeSize()
        for last in range(first, num_rows):
            size = size.add(arranged.num_fed[last], arranged.num_shared[last] if last > first else 0)
            if size.num_nodes > nodes_per_pass and last > first:
                break
            if (cost := cheapest[first] + cost_of(size)) < cheapest[last + 1]:
                cheapest[last + 1], begins[last + 1], sizes[last + 1] = cost, first, size
    return begins, sizes
