"""Random trees: whatever was forked where, facts stay facts and each sampled id is trained once."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.sequences import sampled
from unbroken.ledger.nodes import Origin, Path, Position
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.types import NO_VERSION

EXAMPLES = settings(max_examples=num_cases(60, in_fuzz=1300), derandomize=True)
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=5)
"""Few different ids, so that branches often look alike."""


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Nodes of random ids and origins, at random positions; every sampled id has a logprob that no other has."""
    tree = TokenTree()
    for number in range(draw(st.integers(1, 10))):
        ids = draw(IDS)
        parent = None
        if number and draw(st.integers(0, 9)):
            node = draw(st.integers(0, number - 1))
            parent = Position(node=node, offset=draw(st.integers(1, len(tree.nodes[node].token_ids))))
        if parent is not None and draw(st.booleans()):
            versions = [draw(st.integers(0, 5)) for _ in ids]
            tree.add_sampled(sampled(*ids, versions=versions, first=8 * number + 1), parent=parent)
        else:
            tree.add_given(ids, draw(st.sampled_from([Origin.PROMPT, Origin.BRIDGE])), parent=parent)
    return tree


def owners(path: Path) -> list[tuple[int, int]]:
    """Which id of which node stands at each place of a path."""
    return [(s.node, k) for s in path.segments for k in range(s.stop - s.start)]


@EXAMPLES
@given(trees())
def test_i2_every_sampled_id_is_trained_exactly_once_and_no_other(tree: TokenTree):
    rows = export_samples(tree, 0.5)
    trained = Counter(logprob for row in rows for logprob in row.rollout_logprobs[row.loss_mask].tolist())
    sampled_nodes = [node for node in tree.nodes if node.origin is Origin.SAMPLED]
    assert trained == Counter(logprob for node in sampled_nodes for logprob in node.rollout_logprobs.tolist())
    assert all(count == 1 for count in trained.values())


@EXAMPLES
@given(trees())
def test_i2_facts_are_the_same_in_every_branch_that_shows_them(tree: TokenTree):
    for leaf in tree.leaves():
        path = tree.path(leaf)
        for place, (number, k) in enumerate(owners(path)):
            node = tree.nodes[number]
            is_sampled = node.origin is Origin.SAMPLED
            assert path.token_ids[place] == node.token_ids[k]
            assert path.sampled_mask[place] == is_sampled
            assert np.isfinite(path.rollout_logprobs[place]) == is_sampled
            assert (path.policy_versions[place] != NO_VERSION) == is_sampled
            if is_sampled:
                assert path.rollout_logprobs[place] == np.float32(-(8 * number + k + 1) / 8)
                assert path.policy_versions[place] == node.policy_versions[k]


@EXAMPLES
@given(trees())
def test_every_node_lies_on_a_path_to_a_leaf_and_no_leaf_is_inside_another_node(tree: TokenTree):
    seen = {owner for leaf in tree.leaves() for owner in owners(tree.path(leaf))}
    assert seen == {(number, k) for number, node in enumerate(tree.nodes) for k in range(len(node.token_ids))}


@EXAMPLES
@given(trees(), IDS, st.data())
def test_the_longest_prefix_is_the_longest(tree: TokenTree, tail: list[int], data: st.DataObject):
    leaf = data.draw(st.sampled_from(tree.leaves()))
    known = tree.path(leaf).token_ids.tolist()
    ids = known[: data.draw(st.integers(0, len(known)))] + tail
    position, num_shared = tree.find_longest_prefix(ids)
    paths = [tree.path(end).token_ids.tolist() for end in tree.leaves()]
    assert num_shared == max(common_length(path, ids) for path in paths)
    assert (position is None) == (num_shared == 0)
    if position is not None:
        assert tree.path(position).token_ids.tolist() == ids[:num_shared]
        equal = [end for end in all_positions(tree) if tree.token_ids(end).tolist() == ids[:num_shared]]
        assert position == max(equal, key=lambda end: end.node)


def all_positions(tree: TokenTree) -> list[Position]:
    return [
        Position(node=number, offset=offset)
        for number, node in enumerate(tree.nodes)
        for offset in range(1, len(node.token_ids) + 1)
    ]


@EXAMPLES
@given(trees())
def test_leaves_are_the_ends_that_nothing_is_attached_to(tree: TokenTree):
    parents = {node.parent for node in tree.nodes}
    ends = [Position(node=number, offset=len(node.token_ids)) for number, node in enumerate(tree.nodes)]
    assert tree.leaves() == [end for end in ends if end not in parents]


def common_length(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@EXAMPLES
@given(trees(), st.data())
def test_stepping_back_leaves_the_same_ids_before_it(tree: TokenTree, data: st.DataObject):
    leaf = data.draw(st.sampled_from(tree.leaves()))
    ids = tree.path(leaf).token_ids.tolist()
    num_back = data.draw(st.integers(0, len(ids)))
    position = tree.step_back(leaf, num_back)
    assert (position is None) == (num_back == len(ids))
    if position is not None:
        assert tree.path(position).token_ids.tolist() == ids[: len(ids) - num_back]
