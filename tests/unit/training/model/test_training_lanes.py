"""Which rows share a pass and a lane, and what the model is fed for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.rows import random_rows, row
from unbroken.training.model.lanes import RowLayout, lay_out, plan_passes

CPU = torch.device("cpu")
PACKED = [RowLayout.LANES, RowLayout.ONE_LANE]


def padding(lengths: list[int], passes) -> int:
    """Ids of padding in all passes."""
    total = 0
    for lanes in passes:
        used = [sum(lengths[i] for i in lane) for lane in lanes]
        total += max(used) * len(lanes) - sum(used)
    return total


@pytest.mark.parametrize(
    ("layout", "passes", "wasted"),
    [
        (RowLayout.PADDED, [[[0], [1]], [[2], [3], [4]]], 4),
        (RowLayout.LANES, [[[0], [1, 4]], [[2], [3]]], 1),
        (RowLayout.ONE_LANE, [[[0, 1, 4]], [[2, 3]]], 0),
    ],
)
def test_the_worked_example_of_the_module(layout, passes, wasted):
    lengths = [5, 4, 3, 2, 1]
    assert plan_passes(lengths, 10, layout) == passes
    assert padding(lengths, passes) == wasted


@pytest.mark.parametrize("layout", RowLayout)
def test_a_row_longer_than_the_budget_is_alone_and_whole(layout):
    assert plan_passes([100, 5, 5], 10, layout)[0] == [[0]]
    assert plan_passes([], 10, layout) == []


@pytest.mark.parametrize("layout", RowLayout)
@settings(max_examples=num_cases(120, in_fuzz=3000), derandomize=True)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_for_any_lengths_each_row_is_in_one_lane_of_a_pass_within_the_budget(layout, lengths, budget):
    passes = plan_passes(lengths, budget, layout)
    assert sorted(i for lanes in passes for lane in lanes for i in lane) == list(range(len(lengths)))
    for lanes in passes:
        longest = max(sum(lengths[i] for i in lane) for lane in lanes)
        assert len(lanes) * longest <= budget or [len(lane) for lane in lanes] == [1]
        assert layout is not RowLayout.PADDED or all(len(lane) == 1 for lane in lanes)
        assert layout is not RowLayout.LANES or longest == max(lengths[i] for lane in lanes for i in lane)
        assert layout is not RowLayout.ONE_LANE or len(lanes) == 1
    assert layout is not RowLayout.ONE_LANE or padding(lengths, passes) == 0


@settings(max_examples=num_cases(80, in_fuzz=2000), derandomize=True)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200), st.integers(0, 100))
def test_lanes_are_no_longer_than_a_row_or_the_length_that_costs_little(lengths, budget, free_length):
    for lanes in plan_passes(lengths, budget, RowLayout.LANES, free_length=free_length):
        longest_row = max(lengths[i] for lane in lanes for i in lane)
        used = [sum(lengths[i] for i in lane) for lane in lanes]
        assert max(used) <= max(longest_row, min(free_length, budget))
        assert len(lanes) * max(used) <= max(budget, longest_row)


def test_packing_a_spread_of_lengths_leaves_little_padding():
    """Long-tailed lengths, as those of trajectories are."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 128).astype(int).tolist()
    wasted = {
        layout: padding(lengths, plan_passes(lengths, 16_384, layout, free_length=1024)) / sum(lengths)
        for layout in RowLayout
    }
    assert wasted[RowLayout.ONE_LANE] == 0
    assert wasted[RowLayout.LANES] < 0.04
    assert wasted[RowLayout.PADDED] > 0.15


def test_rows_of_a_lane_lie_end_to_end_with_positions_of_their_own():
    a, b, c = row([5, 6, 7], sampled=[2]), row([8, 9], sampled=[1]), row([1, 2], sampled=[1])
    fed = lay_out([[(a, a.loss_mask), (b, b.loss_mask)], [(c, c.loss_mask)]], CPU)
    assert fed.token_ids_BT.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert fed.mask_BT.tolist() == [[False, False, True, False, True], [False, True, False, False, False]]
    assert fed.position_ids_BT is not None
    assert fed.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


def test_lanes_of_one_row_each_need_no_positions():
    rows = random_rows(np.random.default_rng(0), 4)
    assert lay_out([[(each, each.loss_mask)] for each in rows], CPU).position_ids_BT is None
