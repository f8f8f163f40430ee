"""Rows merged into trees: nodes, who descends from whom, blocks of attention, and which rows share a pass."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from support.effort import num_cases
from support.prefixes import branching_rows
from support.rows import row
from unbroken.training.model.lanes import CPU_COSTS, GPU_COSTS, lay_out, plan_trees_by_cost
from unbroken.training.model.tree import TreeSizes, merge_rows, pick_nodes, plan_trees
from unbroken.training.model.tree_attention import BLOCK, MaskKind, attend, make_block_mask, make_mask

SEEDS = st.integers(0, 2**32 - 1)
SHARED = [5, 6, 7]


def ids_of(*rows):
    return [np.array(each, dtype=np.int32) for each in rows]


def draw(seed: int, num_rows: int, **sizes):
    """Few different ids, so that rows also begin alike by chance."""
    return [each.token_ids for each in branching_rows(np.random.default_rng(seed), num_rows, vocab_size=5, **sizes)]


def test_the_worked_example_of_the_module():
    rows = ids_of([5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 4])
    tree = merge_rows(rows)
    assert tree.token_ids_T.tolist() == [5, 6, 7]
    assert tree.depths_T.tolist() == [0, 1, 2]
    assert tree.ends_T.tolist() == [3, 3, 3]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert tree.num_shared == 5
    inputs, _ = pick_nodes(tree, rows, [np.arange(len(each)) == len(each) - 1 for each in rows])
    places = list(zip(inputs.nodes_U.tolist(), inputs.targets_U.tolist(), strict=True))
    assert [places[place] for place in inputs.places_N.tolist()] == [(2, 8), (1, 9), (2, 4)]


def test_tokens_with_the_same_prefix_have_one_place():
    rows = ids_of([5, 6, 8], [5, 6, 8], [5, 6, 9])
    inputs, _ = pick_nodes(merge_rows(rows), rows, [np.array([False, True, True])] * 3)
    assert len(inputs.nodes_U) == 3
    assert inputs.places_N.tolist() == [0, 1, 0, 1, 0, 2]


@settings(max_examples=num_cases(60, in_fuzz=1500), derandomize=True)
@given(SEEDS, st.integers(1, 9))
def test_for_any_rows_each_path_spells_its_row_and_intervals_are_descendants(seed, num_rows):
    rows = draw(seed, num_rows)
    tree = merge_rows(rows)
    for path, ids in zip(tree.paths, rows, strict=True):
        np.testing.assert_array_equal(tree.token_ids_T[path], ids[:-1])
        np.testing.assert_array_equal(tree.depths_T[path], np.arange(len(ids) - 1))
    prefixes = {tuple(ids[:stop].tolist()) for ids in rows for stop in range(1, len(ids))}
    assert len(tree.token_ids_T) == len(prefixes)
    ancestors = {(int(above), int(node)) for path in tree.paths for node in path for above in path if above <= node}
    numbers = range(len(tree.token_ids_T))
    assert ancestors == {(k, q) for q in numbers for k in numbers if k <= q < tree.ends_T[k]}


@settings(max_examples=num_cases(50, in_fuzz=1000), derandomize=True)
@given(SEEDS, st.integers(1, 7), st.integers(1, 40))
def test_for_any_rows_each_is_in_one_pass_within_the_limit_and_no_cut_is_cheaper(seed, num_rows, limit):
    rows = draw(seed, num_rows)

    def cost(sizes: TreeSizes):
        return 3 + sizes.num_nodes + 0.1 * sizes.num_nodes**2 + 0.01 * sizes.num_pairs + 0.5 * sizes.num_rows**2

    planned, total = plan_trees(rows, limit, cost)
    assert sorted(index for each in planned for index in each.rows) == list(range(num_rows))
    for each in planned:
        tree = merge_rows([rows[index] for index in each.rows])
        assert each.num_nodes == len(tree.token_ids_T)
        assert each.num_nodes <= limit or len(each.rows) == 1
    assert [each.num_nodes for each in planned] == sorted((each.num_nodes for each in planned), reverse=True)
    trees = [merge_rows([rows[index] for index in each.rows]) for each in planned]
    assert total == pytest.approx(float(cost(sizes_of(trees)).sum()))
    assert total == pytest.approx(cheapest_cuts(rows, limit, cost))


def sizes_of(trees) -> TreeSizes:
    return TreeSizes(
        num_nodes=np.array([len(tree.token_ids_T) for tree in trees]),
        num_pairs=np.array([int((tree.depths_T + 1).sum()) for tree in trees]),
        num_rows=np.array([len(tree.paths) for tree in trees]),
    )


def cheapest_cuts(rows, limit, cost) -> float:
    """By trying all cuts of the sorted rows."""
    ordered = sorted(rows, key=lambda ids: ids[:-1].tobytes())
    best = float("inf")
    for number in range(len(rows)):
        for cuts in combinations(range(1, len(rows)), number):
            runs = [ordered[a:b] for a, b in zip((0, *cuts), (*cuts, len(rows)), strict=True)]
            trees = [merge_rows(run) for run in runs]
            if all(len(t.token_ids_T) <= limit or len(run) == 1 for t, run in zip(trees, runs, strict=True)):
                best = min(best, float(cost(sizes_of(trees)).sum()))
    return best


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS])
def test_siblings_share_one_pass_and_a_row_without_relatives_is_no_tree(costs, in_blocks):
    prompt = np.arange(3000)
    rows = ids_of(*(np.append(prompt, np.full(50, number)) for number in range(8)))
    passes, cost = plan_trees_by_cost(rows, 12_288, width=1024, costs=costs, in_blocks=in_blocks)
    assert [each.is_tree for each in passes] == [True]
    assert passes[0].num_shared == 7 * 3000
    assert 3400 < cost < 3400 * 2
    passes, _ = plan_trees_by_cost(rows[:1], 12_288, width=1024, costs=costs, in_blocks=in_blocks)
    assert [each.is_tree for each in passes] == [False]
    assert passes[0].num_shared == 0


def test_a_mask_does_not_join_trees_whose_pairs_it_would_only_hide():
    rows = ids_of(*(np.full(400, number) for number in range(8)))
    masked, _ = plan_trees_by_cost(rows, 12_288, width=64, costs=CPU_COSTS, in_blocks=False)
    in_blocks, _ = plan_trees_by_cost(rows, 12_288, width=64, costs=GPU_COSTS, in_blocks=True)
    assert [len(masked), len(in_blocks)] == [8, 1]


def test_the_lane_of_a_tree_has_its_nodes_and_the_tokens_row_by_row():
    samples = [row([*SHARED, 8], sampled=[2, 3]), row([*SHARED[:2], 9, 1], sampled=[3])]
    fed = lay_out([[(each, each.loss_mask) for each in samples]], torch.device("cpu"), as_tree=True)
    assert fed.token_ids_BT.tolist() == [[5, 6, 7, 9]]
    assert fed.position_ids_BT is not None
    assert fed.position_ids_BT.tolist() == [[0, 1, 2, 2]]
    assert fed.mask_BT.tolist() == [[False, True, True, True]]
    assert fed.tree is not None
    assert fed.tree.targets_U[fed.tree.places_N].tolist() == [7, 8, 1]
    assert [fed.num_ids, fed.num_shared] == [4, 2]


def long_tree(seed: int, num_blocks: int) -> torch.Tensor:
    """The ends of a tree that fills blocks, with padding at the end."""
    rows = draw(seed, 12, longest=40 * num_blocks)
    ends = torch.from_numpy(merge_rows(rows).ends_T)[: num_blocks * BLOCK - 5].clamp(max=num_blocks * BLOCK - 5)
    return torch.cat([ends, torch.arange(len(ends), num_blocks * BLOCK) + 1])


@settings(max_examples=25, derandomize=True)
@given(SEEDS, st.integers(1, 6))
def test_the_blocks_of_any_tree_are_those_that_looking_at_each_pair_finds(seed, num_blocks):
    ends_T = long_tree(seed, num_blocks)
    mask = make_block_mask(ends_T)
    found = create_block_mask(mask.mask_mod, None, None, len(ends_T), len(ends_T), device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert getattr(mask, name).tolist() == getattr(found, name).tolist(), name
    for name in ("kv", "full_kv", "q", "full_q"):
        for number, mine, theirs in zip(
            getattr(mask, f"{name}_num_blocks")[0, 0],
            getattr(mask, f"{name}_indices")[0, 0],
            getattr(found, f"{name}_indices")[0, 0],
            strict=True,
        ):
            assert mine[:number].tolist() == theirs[:number].tolist(), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_key_heads", [1, 2, 6])
def test_flex_attention_computes_what_a_mask_computes(num_key_heads):
    """Its plain mathematics, without a kernel: a CPU has none with a gradient."""
    ends_T = long_tree(3, 3)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, len(ends_T), 16, generator=generator) for heads in (6, *[num_key_heads] * 2)
    )
    with torch.no_grad():
        in_blocks = attend(query, key, value, make_block_mask(ends_T), 0.3)
    masks = [make_mask(ends_T, kind, torch.float32) for kind in (MaskKind.BOOLEAN, MaskKind.ADDED)]
    for mask in masks:
        expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(in_blocks, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
