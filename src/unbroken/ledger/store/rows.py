"""Records as rows of the tables in `schema`, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import (
    GivenRecord,
    ImageRecord,
    MessageRecord,
    SessionRecord,
    SessionStatus,
    TurnRecord,
)
from unbroken.types import FinishReason, SampledSequence, VersionSpan

SESSION_COLUMNS = ("session_id", "key_digest", "created_s", "expires_s", "status", "settings", "outcome")
MESSAGE_COLUMNS = ("node", "parent", "sampled", "message", "delivered")
TURN_COLUMNS = (
    *("number", "choice", "tree", "prompt_node", "reply_node", "tools_key", "options"),
    *("given_parent_node", "given_parent_offset", "given_origin"),
    *("given_ids", "given_message_indices", "given_images"),
    *("parent_node", "parent_offset"),
    *("completion_ids", "rollout_logprobs", "version_spans", "finish_reason", "temperature"),
    *("continued", "fork", "refusal", "tolerances"),
    *("request_digest", "idempotency_key", "answer_id", "created_s"),
)
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_IMAGE_FIELDS = ("offset", "length", "placeholder_id", "sha256", "settings")


def encode_session(record: SessionRecord) -> tuple[Any, ...]:
    """The values of `SESSION_COLUMNS`."""
    return (
        record.session_id,
        record.key_digest,
        record.created_s,
        record.expires_s,
        record.status.value,
        encode_json(record.settings),
        None if record.outcome is None else encode_json(record.outcome),
    )


def decode_session(row: Sequence[Any]) -> SessionRecord:
    """The inverse of `encode_session`."""
    session_id, key_digest, created_s, expires_s, status, settings, outcome = row
    return SessionRecord(
        session_id=session_id,
        key_digest=bytes(key_digest),
        created_s=created_s,
        expires_s=expires_s,
        status=SessionStatus(status),
        settings=json.loads(settings),
        outcome=None if outcome is None else json.loads(outcome),
    )


def encode_message(record: MessageRecord) -> tuple[Any, ...]:
    """The values of `MESSAGE_COLUMNS`."""
    delivered = None if record.delivered is None else encode_json(record.delivered)
    return record.node, record.parent, int(record.sampled), encode_json(record.message), delivered


def decode_message(row: Sequence[Any]) -> MessageRecord:
    """The inverse of `encode_message`."""
    node, parent, sampled, message, delivered = row
    return MessageRecord(
        node=node,
        parent=parent,
        sampled=bool(sampled),
        message=json.loads(message),
        delivered=None if delivered is None else json.loads(delivered),
    )


def encode_turn(record: TurnRecord) -> tuple[Any, ...]:
    """The values of `TURN_COLUMNS`."""
    sequence = record.sequence
    if sequence.routed_experts is not None:
        raise InvariantError("routed_experts are not stored with a session: sample its turns without them")
    spans = [(span.start, span.stop, span.policy_version) for span in sequence.version_spans]
    return (
        *(record.number, record.choice, record.tree, record.prompt_node, record.reply_node),
        *(record.tools_key, encode_json(record.options)),
        *_encode_given(record.given),
        *_encode_position(record.parent),
        _to_bytes(sequence.completion_ids, _INT),
        _to_bytes(sequence.rollout_logprobs, _FLOAT),
        _to_bytes(np.array(spans, dtype=np.int32), _INT),
        sequence.finish_reason.value,
        float(sequence.temperature),
        *(record.continued, record.fork, record.refusal, encode_json(record.tolerances)),
        *(record.request_digest, record.idempotency_key, record.answer_id, record.created_s),
    )


def decode_turn(row: Sequence[Any]) -> TurnRecord:
    """The inverse of `encode_turn`."""
    values = dict(zip(TURN_COLUMNS, row, strict=True))
    parent = _decode_position(values["parent_node"], values["parent_offset"])
    assert parent is not None
    plain = ("number", "choice", "tree", "prompt_node", "reply_node", "tools_key", "continued", "fork", "refusal")
    return TurnRecord(
        **{name: values[name] for name in (*plain, "idempotency_key", "answer_id", "created_s")},
        options=json.loads(values["options"]),
        given=_decode_given(values),
        parent=parent,
        sequence=_decode_sequence(values),
        tolerances=tuple(json.loads(values["tolerances"])),
        request_digest=bytes(values["request_digest"]),
    )


def encode_json(value: Any) -> str:
    """Encode as JSON in ASCII: databases refuse some characters (NUL, half a surrogate pair) that models do write."""
    return json.dumps(value, separators=(",", ":"))


def _encode_given(given: GivenRecord | None) -> tuple[Any, ...]:
    if given is None:
        return (None,) * 6
    images = [[getattr(image, name) for name in _IMAGE_FIELDS] for image in given.images]
    return (
        *_encode_position(given.parent),
        given.origin.value,
        _to_bytes(given.token_ids, _INT),
        _to_bytes(given.message_indices, _INT),
        encode_json(images),
    )


def _decode_given(values: Mapping[str, Any]) -> GivenRecord | None:
    if values["given_origin"] is None:
        return None
    images = json.loads(values["given_images"])
    return GivenRecord(
        parent=_decode_position(values["given_parent_node"], values["given_parent_offset"]),
        origin=Origin(values["given_origin"]),
        token_ids=_to_array(values["given_ids"], _INT),
        message_indices=_to_array(values["given_message_indices"], _INT),
        images=tuple(ImageRecord(**dict(zip(_IMAGE_FIELDS, image, strict=True))) for image in images),
    )


def _decode_sequence(values: Mapping[str, Any]) -> SampledSequence:
    spans = _to_array(values["version_spans"], _INT).reshape(-1, 3).tolist()
    return SampledSequence(
        completion_ids=_to_array(values["completion_ids"], _INT),
        rollout_logprobs=_to_array(values["rollout_logprobs"], _FLOAT),
        finish_reason=FinishReason(values["finish_reason"]),
        version_spans=tuple(VersionSpan(start=a, stop=b, policy_version=version) for a, b, version in spans),
        temperature=values["temperature"],
    )


def _encode_position(position: Position | None) -> tuple[int | None, int | None]:
    return (None, None) if position is None else (position.node, position.offset)


def _decode_position(node: int | None, offset: int | None) -> Position | None:
    return None if node is None or offset is None else Position(node=node, offset=offset)


def _to_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _to_array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="), copy=False)
