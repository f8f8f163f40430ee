"""Any record is read from its row as it was written."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.sessions import to_plain
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import GivenRecord, ImageRecord, MessageRecord, TurnRecord
from unbroken.ledger.store.tables import decode_message, decode_turn, encode_message, encode_turn
from unbroken.rendering.base import TEMPLATE
from unbroken.types import FinishReason, SampledSequence, VersionSpan, token_ids

EXAMPLES = settings(max_examples=num_cases(50, in_fuzz=1000), derandomize=True)
TEXT = st.text(st.characters(), max_size=8)
"""With NUL and halves of surrogate pairs."""
NUMBER = st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
POSITION = st.builds(Position, node=NUMBER, offset=st.integers(1, 2**31 - 1))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
IMAGE = st.builds(
    ImageRecord, offset=NUMBER, length=NUMBER, placeholder_id=NUMBER, sha256=st.just("0" * 64), settings=TEXT
)


@st.composite
def sequences(draw: st.DrawFn) -> SampledSequence:
    ids = draw(st.lists(NUMBER, max_size=6))
    cuts = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=2))})
    return SampledSequence(
        completion_ids=token_ids(ids),
        rollout_logprobs=np.array(draw(st.lists(FLOAT32, min_size=len(ids), max_size=len(ids))), np.float32),
        finish_reason=draw(st.sampled_from(FinishReason)) if ids else FinishReason.ABORT,
        version_spans=tuple(
            VersionSpan(start=a, stop=b, policy_version=draw(NUMBER)) for a, b in itertools.pairwise(cuts)
        ),
        temperature=draw(st.floats(1e-6, 10)),
    )


@st.composite
def given_ids(draw: st.DrawFn) -> GivenRecord:
    ids = draw(st.lists(st.tuples(NUMBER, st.integers(TEMPLATE, 2**31 - 1)), max_size=6))
    return GivenRecord(
        parent=draw(st.none() | POSITION),
        origin=draw(st.sampled_from([Origin.PROMPT, Origin.BRIDGE])),
        token_ids=token_ids([number for number, _ in ids]),
        message_indices=np.array([index for _, index in ids], np.int32),
        images=tuple(draw(st.lists(IMAGE, max_size=2))),
    )


TURN = st.builds(
    TurnRecord,
    number=NUMBER,
    choice=NUMBER,
    tree=NUMBER,
    prompt_node=NUMBER,
    reply_node=NUMBER,
    tools_key=TEXT,
    options=OBJECT,
    given=st.none() | given_ids(),
    parent=POSITION,
    sequence=sequences(),
    continued=st.none() | TEXT,
    fork=st.none() | TEXT,
    refusal=st.none() | TEXT,
    tolerances=st.lists(TEXT, max_size=3).map(tuple),
    request_digest=st.binary(max_size=4),
    idempotency_key=st.none() | TEXT,
    answer_id=TEXT,
    created_s=st.floats(0, 4e9),
    policy=TEXT,
    sampling=OBJECT,
)
MESSAGE = st.builds(
    MessageRecord,
    node=NUMBER,
    parent=st.none() | NUMBER,
    message=OBJECT,
    sampled=st.booleans(),
    delivered=st.none() | OBJECT,
)


@EXAMPLES
@given(TURN)
def test_i2_a_turn_is_read_as_it_was_written(turn: TurnRecord):
    assert to_plain(decode_turn(encode_turn(turn))) == to_plain(turn)


@EXAMPLES
@given(MESSAGE)
def test_a_message_is_read_as_it_was_written(message: MessageRecord):
    assert decode_message(encode_message(message)) == message
