"""Records of sessions: checked where they are made, and enough to make a tree again."""

from dataclasses import replace

import numpy as np
import pytest

from support.images import image_span
from support.sequences import sampled
from support.sessions import make_commit, make_session, make_turn, to_plain
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import GivenRecord, ImageRecord, MessageRecord, TurnCommit
from unbroken.ledger.tree import TokenTree
from unbroken.types import EncodedImage, TopLogprobs


def test_turns_make_the_tree_that_they_were_recorded_from():
    tree = TokenTree()
    for number in range(3):
        turn = make_turn(number)
        assert turn.given is not None
        given = turn.given
        parent = tree.add_given(
            given.token_ids, given.origin, parent=given.parent, message_indices=given.message_indices
        )
        assert parent == turn.parent
        end = tree.add_sampled(turn.sequence, parent=turn.parent)
    path = tree.path(end)
    assert path.sampled_mask.tolist() == ([False] * 5 + [True] * 5) * 3
    np.testing.assert_array_equal(path.rollout_logprobs[-5:], make_turn(2).sequence.rollout_logprobs)


@pytest.mark.parametrize("session_id", ["", "\0", "a\nb", "\ud800"])
def test_a_session_needs_a_printable_id(session_id):
    with pytest.raises(InvariantError, match="session_id must be printable"):
        make_session(session_id)


def test_a_session_has_the_digest_of_its_key_and_does_not_print_it():
    with pytest.raises(InvariantError, match="32 bytes, got 3"):
        replace(make_session(), key_digest=b"key")
    assert "key_digest" not in repr(make_session())


def test_given_ids_are_not_sampled_and_each_has_a_message_index():
    arguments = {"parent": None, "token_ids": [1, 2], "message_indices": [0, 0]}
    with pytest.raises(InvariantError, match="origin must be prompt or bridge"):
        GivenRecord(origin=Origin.SAMPLED, **arguments)
    with pytest.raises(InvariantError, match=r"shape \(1,\) for 2 ids"):
        GivenRecord(origin=Origin.PROMPT, **{**arguments, "message_indices": [0]})


def test_a_turn_does_not_keep_top_logprobs():
    tops = TopLogprobs(token_ids=np.zeros((1, 2), np.int32), logprobs=np.zeros((1, 2), np.float32))
    turn = replace(make_turn(0), sequence=replace(sampled(3), top_logprobs=tops))
    assert turn.sequence.top_logprobs is None
    assert turn.sequence.completion_ids.tolist() == [3]


def test_an_image_is_made_a_span_again_only_with_its_own_bytes():
    span = image_span(offset=3, length=2, image="cat")
    record = ImageRecord.from_span(span)
    assert record.to_span(span.image) == span
    with pytest.raises(InvariantError, match="must be the recorded one"):
        record.to_span(EncodedImage(b"a dog"))


def test_a_commit_names_each_image_once():
    content = [{"type": "text", "text": "x"}, {"type": "image", "sha256": "a"}, {"type": "image", "sha256": "b"}]
    messages = tuple(
        MessageRecord(node=k, parent=None, message={"role": "user", "content": content}, sampled=False)
        for k in range(2)
    )
    turn = make_turn(0, image=b"file")
    assert turn.given is not None
    commit = TurnCommit(session_id="s", messages=messages, turns=(turn,), images={"b": b""})
    assert commit.image_sha256s == ("b", "a", turn.given.images[0].sha256)
    assert make_commit().image_sha256s == ()


def test_records_are_compared_with_their_types():
    assert to_plain(make_turn(1)) == to_plain(make_turn(1)) != to_plain(make_turn(2))
    assert to_plain(np.zeros(1, np.int32)) != to_plain(np.zeros(1, np.int64))
    assert to_plain(Position(node=1, offset=2)) == {"node": 1, "offset": 2}
