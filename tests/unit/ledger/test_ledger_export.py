"""Rows from trees: one per branch, every sampled id trained once."""

import math

import numpy as np
import pytest

from support.images import image_span
from support.sequences import sampled
from unbroken.errors import InvalidInputError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree, export_samples


def worked_example() -> TokenTree:
    tree = TokenTree()
    prompt = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    turn = tree.add_sampled(sampled(3, 4), parent=prompt)
    bridge = tree.add_given([5, 6], Origin.BRIDGE, parent=turn)
    tree.add_sampled(sampled(7, 4), parent=bridge)
    rewritten = tree.add_given([9], Origin.PROMPT, parent=Position(node=1, offset=1))
    tree.add_sampled(sampled(8), parent=rewritten)
    return tree


def test_the_worked_example_holds():
    first, second = export_samples(worked_example(), 0.5)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 4]
    assert (
        first.loss_mask.tolist() == first.sampled_mask.tolist() == [False, False, True, True, False, False, True, True]
    )
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5]
    assert second.token_ids.tolist() == [1, 2, 3, 9, 8]
    assert second.sampled_mask.tolist() == [False, False, True, False, True]
    assert second.loss_mask.tolist() == [False, False, False, False, True]
    assert second.advantages.tolist() == [0, 0, 0, 0, 0.5]
    assert second.rollout_logprobs[2] == first.rollout_logprobs[2]


def test_a_second_branch_that_left_earlier_trains_only_its_own_ids():
    tree = worked_example()
    tree.add_sampled(sampled(8, 8), parent=Position(node=0, offset=1))
    third = export_samples(tree, 1.0)[2]
    assert third.token_ids.tolist() == [1, 8, 8]
    assert third.loss_mask.tolist() == [False, True, True]


def test_the_first_branch_to_pass_trains_shared_ids_and_a_later_longer_one_the_rest():
    tree = TokenTree()
    prompt = tree.add_given([1], Origin.PROMPT, parent=None)
    tree.add_sampled(sampled(2, 3, 4), parent=prompt)
    wrong_header = tree.add_given([5], Origin.BRIDGE, parent=Position(node=1, offset=2))
    tree.add_sampled(sampled(6), parent=wrong_header)
    first, second = export_samples(tree, 1.0)
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 3, 4], [False, True, True, True])
    assert second.token_ids.tolist() == [1, 2, 3, 5, 6]
    assert second.loss_mask.tolist() == [False, False, False, False, True]


def test_a_row_ends_with_its_last_trained_id():
    tree = TokenTree()
    prompt = tree.add_given([1], Origin.PROMPT, parent=None)
    turn = tree.add_sampled(sampled(2), parent=prompt)
    tree.add_given([3, 4], Origin.BRIDGE, parent=turn, images=[image_span(offset=1, length=1, image="cat")])
    [row] = export_samples(tree, 1.0)
    assert row.token_ids.tolist() == [1, 2]
    assert row.images == ()


def test_a_branch_with_nothing_of_its_own_to_train_gives_no_row():
    tree = worked_example()
    tree.add_given([9, 9], Origin.PROMPT, parent=Position(node=1, offset=2))
    tree.add_given([4], Origin.PROMPT, parent=None)
    assert len(tree.leaves()) == 4
    assert len(export_samples(tree, 1.0)) == 2
    assert export_samples(TokenTree(), 1.0) == []


def test_an_advantage_of_zero_still_gives_rows():
    rows = export_samples(worked_example(), 0.0)
    assert [int(row.loss_mask.sum()) for row in rows] == [4, 1]


def test_a_row_keeps_the_images_of_its_path():
    tree = TokenTree()
    image = image_span(offset=0, length=1, image="cat")
    prompt = tree.add_given([7], Origin.PROMPT, parent=None, images=[image])
    tree.add_sampled(sampled(2), parent=prompt)
    assert export_samples(tree, 1.0)[0].images == (image,)


def test_each_sampled_node_has_an_advantage_of_its_own_or_the_missing_ones_are_named():
    numbers = [number for number, node in enumerate(worked_example().nodes) if node.origin is Origin.SAMPLED]
    first, second = export_samples(worked_example(), dict(zip(numbers, (0.5, -0.25, 2.0), strict=True)))
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.25, -0.25]
    assert second.advantages.tolist() == [0, 0, 0, 0, 2.0]
    with pytest.raises(InvalidInputError, match=rf"a number for each sampled node, but has none for \[{numbers[1]}\]"):
        export_samples(worked_example(), {numbers[0]: 1.0, numbers[2]: 1.0})


def test_rows_are_built_once_and_again_when_the_tree_has_grown():
    tree = worked_example()
    first = tree.rows
    assert tree.rows is first
    assert export_samples(tree, 1.0)[0].token_ids is first[0][1].token_ids
    tree.add_sampled(sampled(6), parent=tree.leaves()[1])
    assert [row.token_ids.tolist()[-1] for _, row in tree.rows] == [4, 6]


@pytest.mark.parametrize("advantage", [math.nan, math.inf, -math.inf, float(np.float64(1e300))])
def test_an_advantage_that_is_not_finite_in_float32_is_refused(advantage):
    with pytest.raises(InvalidInputError, match="advantage must be"):
        export_samples(worked_example(), advantage)


def test_a_branch_with_several_temperatures_gives_a_row_for_each_and_trains_every_id_once():
    tree = TokenTree()
    end = tree.add_given([1], Origin.PROMPT, parent=None)
    for ids, temperature, given in (([2, 3], 1.0, 4), ([5], 0.7, 6), ([7], 1.0, 8)):
        end = tree.add_sampled(sampled(*ids, temperature=temperature), parent=end)
        end = tree.add_given([given], Origin.BRIDGE, parent=end)
    hot, cold = export_samples(tree, 1.0)
    assert (hot.temperature, hot.token_ids[hot.loss_mask].tolist()) == (1.0, [2, 3, 7])
    assert (cold.temperature, cold.token_ids[cold.loss_mask].tolist()) == (0.7, [5])
    assert cold.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert cold.sampled_mask.tolist() == [False, True, True, False, True]
    assert [path.segments[-1].node for path, _ in tree.rows] == [6, 6]  # given ids, after the rows


def test_branches_of_different_temperatures_are_rows_of_their_own_temperature():
    tree = TokenTree()
    prompt = tree.add_given([1], Origin.PROMPT, parent=None)
    tree.add_sampled(sampled(2, temperature=1.0), parent=prompt)
    tree.add_sampled(sampled(3, temperature=0.7), parent=prompt)
    assert [row.temperature for row in export_samples(tree, 1.0)] == [1.0, 0.7]
