"""Routed experts in the tree: each id keeps those under which it was first computed, and rows get them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.sequences import sampled
from support.sessions import make_turn
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.store.tables import encode_turn
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.types import SampledSequence, SampleResult, token_ids


def with_experts(sequence: SampledSequence, num_ids: int, *, request: int, dtype=np.uint8) -> SampledSequence:
    """Experts of a request over `num_ids` ids: id k has expert 10 * request + k, in two layers."""
    experts = np.repeat((10 * request + np.arange(num_ids - 1)).astype(dtype), 4).reshape(-1, 2, 2)
    return replace(sequence, routed_experts=experts)


def two_turns() -> tuple[TokenTree, Position]:
    """Prompt 1 2, completion 3 4, bridge 5 6, completion 7 4; each request reports all ids but its last."""
    tree = TokenTree()
    end = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    end = tree.add_sampled(with_experts(sampled(3, 4), 4, request=1), parent=end)
    end = tree.add_given([5, 6], Origin.BRIDGE, parent=end)
    return tree, tree.add_sampled(with_experts(sampled(7, 4), 8, request=2), parent=end)


def first_experts(experts) -> list[int]:
    assert (experts == experts[:, :1, :1]).all()
    return experts[:, 0, 0].tolist()


def test_an_id_keeps_the_experts_of_the_request_that_computed_it_first():
    """The first completion's last id was no input of its own request, so the second request computed it first."""
    tree, end = two_turns()
    assert first_experts(tree.path(end).routed_experts) == [10, 11, 12, 23, 24, 25, 26]
    assert [None if node.routed_experts is None else len(node.routed_experts) for node in tree.nodes] == [
        None, 3, None, 4,
    ]  # fmt: skip


def test_a_fork_keeps_the_experts_of_what_it_shares():
    tree, _ = two_turns()
    start, num_shared = tree.find_longest_prefix([1, 2, 3, 9])
    end = tree.add_given([9], Origin.PROMPT, parent=start)
    end = tree.add_sampled(with_experts(sampled(8), 5, request=3), parent=end)
    assert num_shared == 3
    assert first_experts(tree.path(end).routed_experts) == [10, 11, 12, 33]


def test_a_path_that_ends_inside_of_a_completion_has_the_experts_of_its_ids_alone():
    tree, _ = two_turns()
    assert first_experts(tree.path(Position(node=1, offset=1)).routed_experts) == [10, 11, 12]
    assert first_experts(tree.path(Position(node=3, offset=1)).routed_experts) == [10, 11, 12, 23, 24, 25, 26]
    assert tree.path(Position(node=0, offset=2)).routed_experts is None


def test_a_turn_without_experts_is_filled_by_the_next_one():
    tree = TokenTree()
    end = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    end = tree.add_sampled(sampled(3, 4), parent=end)
    assert tree.path(end).routed_experts is None
    end = tree.add_given([5], Origin.BRIDGE, parent=end)
    end = tree.add_sampled(with_experts(sampled(7), 6, request=2), parent=end)
    assert first_experts(tree.path(end).routed_experts) == [20, 21, 22, 23, 24]


def test_rows_have_the_experts_of_their_ids_and_end_with_their_last_trained_id():
    tree, _ = two_turns()
    start, _ = tree.find_longest_prefix([1, 2, 3, 9])
    end = tree.add_given([9], Origin.PROMPT, parent=start)
    tree.add_sampled(with_experts(sampled(8), 5, request=3), parent=end)
    first, second = export_samples(tree, 1.0)
    assert first_experts(first.routed_experts) == [10, 11, 12, 23, 24, 25, 26]
    assert first_experts(second.routed_experts) == [10, 11, 12, 33]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((5, 2, 2), np.int64), "must be uint8 or uint16, got dtype int64"),
        (np.zeros((5, 2), np.uint8), r"shape \[ids, layers, experts per id\], got \(5, 2\)"),
        (np.zeros((5, 0, 2), np.uint8), r"got \(5, 0, 2\)"),
    ],
)
def test_experts_are_checked_where_they_enter(experts, message):
    with pytest.raises(InvariantError, match=message):
        replace(sampled(3, 4), routed_experts=experts)


def test_every_id_but_the_last_needs_experts():
    sequence = with_experts(sampled(3, 4), 4, request=1)
    SampleResult(prompt_ids=token_ids([1, 2]), sequences=(sequence,))
    with pytest.raises(InvariantError, match=r"routed_experts of sequences\[0\] has 3 entries for 3 prompt_ids and 2"):
        SampleResult(prompt_ids=token_ids([1, 2, 9]), sequences=(sequence,))
    tree = TokenTree()
    end = tree.add_given([1, 2, 9], Origin.PROMPT, parent=None)
    with pytest.raises(InvariantError, match="routed_experts has 3 entries for 5 ids on the path"):
        tree.add_sampled(sequence, parent=end)


def test_experts_of_another_model_are_not_added_to_a_path():
    tree, end = two_turns()
    other = replace(sampled(5), routed_experts=np.zeros((8, 3, 2), np.uint8))
    with pytest.raises(InvariantError, match=r"of the ids before, \(2, 2\), got \(3, 2\)"):
        tree.add_sampled(other, parent=end)


def test_a_store_refuses_experts_which_it_would_lose():
    turn = make_turn()
    num_ids = 2 + len(turn.sequence.completion_ids)
    with pytest.raises(InvariantError, match="routed_experts are not stored with a session"):
        encode_turn(replace(turn, sequence=with_experts(turn.sequence, num_ids, request=1)))
    encode_turn(turn)
