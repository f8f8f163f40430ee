"""The token tree: what goes in comes out unchanged, and a fork shares its prefix."""

import numpy as np
import pytest

from support.images import image_span
from support.sequences import sampled
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.rendering.base import TEMPLATE
from unbroken.types import NO_VERSION, FinishReason

CAT, DOG = "cat", "dog"


def line() -> tuple[TokenTree, Position]:
    """The worked example of the module: prompt, completion, bridge, completion."""
    tree = TokenTree()
    end = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    end = tree.add_sampled(sampled(3, 4), parent=end)
    end = tree.add_given([5, 6], Origin.BRIDGE, parent=end, message_indices=np.array([TEMPLATE, 2], np.int32))
    return tree, tree.add_sampled(sampled(7, 4, versions=[1, 2]), parent=end)


def forked() -> tuple[TokenTree, Position]:
    """The worked example's second half."""
    tree, _ = line()
    start, num_shared = tree.find_longest_prefix([1, 2, 3, 9])
    end = tree.add_given([9], Origin.PROMPT, parent=start)
    assert num_shared == 3
    return tree, tree.add_sampled(sampled(8), parent=end)


def test_a_line_is_read_back_as_it_was_written():
    tree, end = line()
    path = tree.path(end)
    assert path.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 4]
    assert path.sampled_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert path.policy_versions.tolist() == [-1, -1, 0, 0, -1, -1, 1, 2]
    assert path.message_indices.tolist() == [-1, -1, -1, -1, -1, 2, -1, -1]
    assert path.origins == (Origin.PROMPT,) * 2 + (Origin.SAMPLED,) * 2 + (Origin.BRIDGE,) * 2 + (Origin.SAMPLED,) * 2
    np.testing.assert_array_equal(
        path.rollout_logprobs, np.array([np.nan, np.nan, -1 / 8, -2 / 8, np.nan, np.nan, -1 / 8, -2 / 8], np.float32)
    )


def test_i2_only_sampled_ids_have_a_logprob_and_a_version():
    tree, end = forked()
    for leaf in [*tree.leaves(), end]:
        path = tree.path(leaf)
        assert (np.isfinite(path.rollout_logprobs) == path.sampled_mask).all()
        assert ((path.policy_versions != NO_VERSION) == path.sampled_mask).all()


def test_a_fork_inside_a_completion_shares_its_prefix_and_changes_nothing():
    tree, end = forked()
    assert tree.path(end).token_ids.tolist() == [1, 2, 3, 9, 8]
    assert tree.path(end).sampled_mask.tolist() == [False, False, True, False, True]
    assert tree.leaves() == [Position(node=3, offset=2), Position(node=5, offset=1)]
    before, before_end = line()
    np.testing.assert_array_equal(tree.path(before_end).token_ids, before.path(before_end).token_ids)
    assert len(tree.nodes) == 6


def test_i6_a_path_keeps_the_version_of_every_id_when_weights_changed_in_mid_sequence():
    tree, end = line()
    assert tree.path(end).policy_versions[-2:].tolist() == [1, 2]


def test_a_copy_is_a_tree_of_its_own():
    tree, end = forked()
    copy = tree.copy()
    tree.add_given([1], Origin.BRIDGE, parent=end)
    assert copy.nodes == tree.nodes[:-1]
    assert copy.leaves() == [Position(node=3, offset=2), end]
    assert copy.find_longest_prefix([1, 2, 3, 9, 8, 1]) == (end, 5)
    assert tree.find_longest_prefix([1, 2, 3, 9, 8, 1]) == (Position(node=6, offset=1), 6)


def test_sampled_ids_and_their_versions_are_counted_once_in_all_branches():
    tree, _ = forked()
    assert (tree.num_sampled, tree.sampled_versions) == (5, (0, 1, 2))
    assert (TokenTree().num_sampled, TokenTree().sampled_versions) == (0, ())


def test_the_longest_prefix_of_an_unknown_prompt_is_nothing():
    tree, _ = line()
    assert tree.find_longest_prefix([9, 9]) == (None, 0)
    assert TokenTree().find_longest_prefix([1]) == (None, 0)


def test_the_longest_prefix_of_an_extension_is_the_leaf():
    tree, end = line()
    assert tree.find_longest_prefix([1, 2, 3, 4, 5, 6, 7, 4, 99]) == (end, 8)


def test_the_longest_prefix_prefers_the_newest_of_equal_branches():
    tree = TokenTree()
    prompt = tree.add_given([1], Origin.PROMPT, parent=None)
    tree.add_sampled(sampled(2), parent=prompt)
    newest = tree.add_sampled(sampled(2), parent=prompt)
    assert tree.find_longest_prefix([1, 2, 3]) == (newest, 2)


def test_the_longest_prefix_ends_before_the_first_image_that_differs():
    tree = TokenTree()
    tree.add_given([1, 7, 7, 2], Origin.PROMPT, parent=None, images=[image_span(offset=1, length=2, image=CAT)])
    same = [image_span(offset=1, length=2, image=CAT)]
    other = [image_span(offset=1, length=2, image=DOG)]
    longer = [image_span(offset=1, length=3, image=CAT)]
    assert tree.find_longest_prefix([1, 7, 7, 2], images=same)[1] == 4
    assert tree.find_longest_prefix([1, 7, 7, 2], images=other) == (Position(node=0, offset=1), 1)
    assert tree.find_longest_prefix([1, 7, 7, 7], images=longer)[1] == 1
    assert tree.find_longest_prefix([1, 7], images=[])[1] == 1


def test_a_path_places_the_images_of_all_its_nodes():
    tree = TokenTree()
    prompt = tree.add_given([7, 1], Origin.PROMPT, parent=None, images=[image_span(offset=0, length=1, image=CAT)])
    turn = tree.add_sampled(sampled(2), parent=prompt)
    end = tree.add_given([3, 7], Origin.BRIDGE, parent=turn, images=[image_span(offset=1, length=1, image=DOG)])
    assert [(i.offset, i.image.data) for i in tree.path(end).images] == [(0, b"cat"), (4, b"dog")]
    assert [(i.offset, i.image.data) for i in tree.path(Position(node=2, offset=1)).images] == [(0, b"cat")]


def test_an_image_is_not_divided_by_a_fork():
    tree = TokenTree()
    tree.add_given([7, 7, 7], Origin.PROMPT, parent=None, images=[image_span(offset=0, length=3, image=CAT)])
    with pytest.raises(InvariantError, match="inside the image"):
        tree.add_given([1], Origin.PROMPT, parent=Position(node=0, offset=2))


@pytest.mark.parametrize(
    "spans",
    [
        [image_span(offset=1, length=2, image=CAT)],
        [image_span(offset=1, length=1, image=CAT), image_span(offset=0, length=1, image=CAT)],
        [image_span(offset=0, length=2, image=CAT), image_span(offset=1, length=1, image=DOG)],
    ],
)
def test_image_spans_that_overlap_or_leave_their_ids_are_refused(spans):
    with pytest.raises(InvariantError, match="image spans must be in order"):
        TokenTree().add_given([7, 7], Origin.PROMPT, parent=None, images=spans)


def test_stepping_back_crosses_nodes_and_ends_before_the_first_id():
    tree, end = line()
    assert tree.step_back(end, 0) == end
    assert tree.step_back(end, 1) == Position(node=3, offset=1)
    assert tree.step_back(end, 2) == Position(node=2, offset=2)
    assert tree.step_back(end, 8) is None
    with pytest.raises(InvariantError, match="cannot step back 9 ids on a path of 8"):
        tree.step_back(end, 9)


def test_an_aborted_completion_has_no_place_in_the_tree():
    tree, end = line()
    with pytest.raises(InvariantError, match="aborted"):
        tree.add_sampled(sampled(1, finish_reason=FinishReason.ABORT), parent=end)
    assert tree.leaves() == [end]


def test_sampled_ids_cannot_be_given():
    with pytest.raises(InvariantError, match="add_sampled"):
        TokenTree().add_given([1], Origin.SAMPLED, parent=None)


def test_a_node_holds_at_least_one_id():
    with pytest.raises(InvariantError, match="at least one id"):
        TokenTree().add_given([], Origin.PROMPT, parent=None)


@pytest.mark.parametrize(("node", "offset"), [(4, 1), (-1, 1), (1, 0), (1, 3)])
def test_a_parent_outside_the_tree_is_refused(node, offset):
    tree, _ = line()
    with pytest.raises(InvariantError, match="parent"):
        tree.add_given([1], Origin.BRIDGE, parent=Position(node=node, offset=offset))


def test_message_indices_of_another_length_are_refused():
    with pytest.raises(InvariantError, match=r"message_indices has shape \(1,\) for 2 ids"):
        TokenTree().add_given([1, 2], Origin.PROMPT, parent=None, message_indices=np.zeros(1, np.int32))


def test_what_the_tree_returns_cannot_be_written_to():
    tree, end = line()
    path = tree.path(end)
    for array in (path.token_ids, path.sampled_mask, path.rollout_logprobs, path.policy_versions, path.message_indices):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for node in tree.nodes:
        assert not node.token_ids.flags.writeable
        assert not node.message_indices.flags.writeable


def test_ids_given_as_an_array_are_not_shared_with_the_caller():
    ids = np.array([1, 2], np.int32)
    tree = TokenTree()
    end = tree.add_given(ids, Origin.PROMPT, parent=None)
    ids[0] = 99
    assert tree.path(end).token_ids.tolist() == [1, 2]
