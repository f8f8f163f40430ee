"""Kept ids in the tree, in rows and in a store: each sampled id has the set that it was sampled from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.sequences import sampled
from support.sessions import make_turn
from unbroken.errors import EngineError, InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.store.tables import TURN_COLUMNS, decode_turn, encode_turn
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.types import (
    ControlSpan,
    KeptIds,
    LogitControls,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    token_ids,
)


def with_sets(sequence: SampledSequence, *sets: list[int]) -> SampledSequence:
    return replace(sequence, kept_ids=KeptIds.of(sets))


def two_turns() -> tuple[TokenTree, Position]:
    """Prompt 1 2, completion 3 4, bridge 5 6, completion 7 4, whose turn cut nothing."""
    tree = TokenTree()
    end = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    end = tree.add_sampled(with_sets(sampled(3, 4), [3, 8, 9], []), parent=end)
    end = tree.add_given([5, 6], Origin.BRIDGE, parent=end)
    return tree, tree.add_sampled(sampled(7, 4), parent=end)


def test_a_path_and_its_row_have_a_set_for_each_id_and_given_ones_the_whole_vocabulary():
    tree, end = two_turns()
    assert tree.path(end).kept_ids.to_lists() == [[], [], [3, 8, 9], [], [], [], [], []]
    (row,) = export_samples(tree, 1.0)
    assert row.kept_ids.to_lists() == [[], [], [3, 8, 9], [], [], [], [], []]
    assert tree.path(Position(node=1, offset=1)).kept_ids.to_lists() == [[], [], [3, 8, 9]]


def test_a_fork_has_the_sets_of_what_it_shares():
    tree, _ = two_turns()
    start, _ = tree.find_longest_prefix([1, 2, 3, 9])
    end = tree.add_given([9], Origin.PROMPT, parent=start)
    tree.add_sampled(with_sets(sampled(8), [8, 9]), parent=end)
    _, second = export_samples(tree, 1.0)
    assert second.kept_ids.to_lists() == [[], [], [3, 8, 9], [], [8, 9]]


def test_rows_without_cuts_have_nothing():
    tree = TokenTree()
    tree.add_sampled(sampled(3, 4), parent=tree.add_given([1, 2], Origin.PROMPT, parent=None))
    assert export_samples(tree, 1.0)[0].kept_ids is None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[3], [4], [5]], r"kept_ids has 3 sets for 2 completion_ids"),
        ([[3], [5, 6]], r"completion_ids\[1\] is 4, which is not in its kept_ids"),
    ],
)
def test_sets_are_checked_where_they_enter(sets, message):
    with pytest.raises(InvariantError, match=message):
        with_sets(sampled(3, 4), *sets)


def test_a_given_id_has_no_set():
    (row,) = export_samples(two_turns()[0], 1.0)
    with pytest.raises(InvariantError, match="only sampled ids have kept_ids"):
        replace(row, kept_ids=KeptIds.of([[1], *[[]] * 7]))


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [1, 3], [0, 2], []])
def test_offsets_are_checked(offsets):
    with pytest.raises(InvariantError, match=r"kept_ids\.offsets"):
        KeptIds(token_ids=token_ids([1, 2, 3]), offsets=np.array(offsets, dtype=np.int64))


def test_a_store_keeps_the_sets_of_a_turn():
    turn = make_turn()
    kept = KeptIds.of([[int(token_id), int(token_id) + 1] for token_id in turn.sequence.completion_ids])
    for sequence in (turn.sequence, replace(turn.sequence, kept_ids=kept)):
        row = encode_turn(replace(turn, sequence=sequence))
        assert len(row) == len(TURN_COLUMNS)
        found = decode_turn(row).sequence.kept_ids
        assert (found is None) == (sequence.kept_ids is None)
    assert found.to_lists() == kept.to_lists()


def test_an_engine_that_does_not_say_the_sets_is_refused():
    params = SamplingParams(top_p=0.9, top_k=3, return_kept_ids=True)
    request = SampleRequest(request_id="r", prompt_ids=[1, 2], params=params)
    result = SampleResult(prompt_ids=request.prompt_ids, sequences=(sampled(3),))
    with pytest.raises(EngineError, match=r"sampling\.top_k 3, top_p 0\.9 cannot be combined with return_kept_ids"):
        result.check_answers(request)
    for uncut in (replace(params, temperature=0.0), SamplingParams(return_kept_ids=True)):
        result.check_answers(replace(request, params=uncut))


def test_a_row_has_a_span_for_each_completion_whose_logits_were_changed_and_a_fork_its_own():
    """Prompt 1 2, completion 3 4 under a penalty, bridge 5 6, completion 7 4 under nothing; a fork after 3."""
    first, second = LogitControls(presence_penalty=1.0), LogitControls(logit_bias=((8, 1.0),))
    tree = TokenTree()
    end = tree.add_given([1, 2], Origin.PROMPT, parent=None)
    end = tree.add_sampled(replace(sampled(3, 4), controls=first), parent=end)
    tree.add_sampled(sampled(7, 4), parent=tree.add_given([5, 6], Origin.BRIDGE, parent=end))
    end = tree.add_given([9], Origin.PROMPT, parent=tree.find_longest_prefix([1, 2, 3, 9])[0])
    tree.add_sampled(replace(sampled(8, 6), controls=second), parent=end)
    one, other = export_samples(tree, 1.0)
    assert one.controls == (ControlSpan(start=2, stop=4, controls=first),)
    assert other.controls == (
        ControlSpan(start=2, stop=3, controls=first),
        ControlSpan(start=4, stop=6, controls=second),
    )


def test_a_store_keeps_what_changed_the_logits_of_a_turn():
    params = SamplingParams(
        logit_bias=((3, 0.1),),
        allowed_token_ids=(3, 4, 7),
        min_tokens=2,
        stop_token_ids=(7, 4),
        temperature=0.7,
        repetition_penalty=1.1,
        bad_words_ids=((5,), (3, 3)),
        frequency_penalty=-0.3,
    )
    turn = make_turn()
    turn = replace(turn, sequence=replace(turn.sequence, controls=params.controls), sampling=params.changes)
    assert decode_turn(encode_turn(turn)).sequence.controls == params.controls
    with pytest.raises(InvariantError, match="sampling must have the turn's controls"):
        encode_turn(replace(turn, sampling={}))


lists = st.lists(st.lists(st.integers(0, 99), unique=True).map(sorted), max_size=8)


@given(sets=lists, data=st.data())
def test_cuts_picks_and_joins_are_those_of_lists(sets, data):
    kept = KeptIds.of(sets)
    stop = data.draw(st.integers(0, len(sets)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(sets), max_size=len(sets))), dtype=np.bool_)
    assert kept.to_lists() == sets
    assert kept.cut(stop).to_lists() == sets[:stop]
    assert kept.pick(mask).to_lists() == [one for one, wanted in zip(sets, mask, strict=True) if wanted]
    assert kept.pick(np.flatnonzero(mask)[::-1]).to_lists() == [sets[k] for k in np.flatnonzero(mask)[::-1]]
    joined = KeptIds.join([(kept, len(sets)), (None, 2), (kept, len(sets))])
    assert joined.to_lists() == [*sets, [], [], *sets]


@given(data=st.data(), shape=st.tuples(st.integers(1, 4), st.integers(1, 6)))
def test_of_the_most_likely_ids_those_with_a_finite_logprob_were_kept(data, shape):
    ids = np.stack([data.draw(st.permutations(range(20))) for _ in range(shape[0])])[:, : shape[1]]
    sizes = data.draw(st.lists(st.integers(1, shape[1]), min_size=shape[0], max_size=shape[0]))
    logprobs = np.where(np.arange(shape[1]) < np.array(sizes)[:, None], -1.0, -np.inf)
    if max(sizes) == shape[1]:
        with pytest.raises(EngineError, match="set a smaller top_k, or raise"):
            KeptIds.of_top(ids, logprobs, vocab_size=20, of="top_k 3")
        kept = KeptIds.of_top(ids, logprobs, vocab_size=shape[1], of="top_k 3")
    else:
        kept = KeptIds.of_top(ids, logprobs, vocab_size=20, of="top_k 3")
    assert kept.to_lists() == [
        [] if size == shape[1] else sorted(row[:size].tolist()) for row, size in zip(ids, sizes, strict=True)
    ]
