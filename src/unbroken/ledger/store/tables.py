"""The tables of a store, records as their rows, and how tables of an earlier version become ours.

Both databases have the same tables (docs/design/0013-sessions.md); a few types have other names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvariantError, StoreError
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import (
    GivenRecord,
    ImageRecord,
    MessageRecord,
    SessionRecord,
    SessionStatus,
    StreamRecord,
    TurnRecord,
)
from unbroken.types import FinishReason, KeptIds, LogitControls, SampledSequence, VersionSpan

_VERSION_1 = (
    """
    CREATE TABLE sessions (
        session {key},
        session_id TEXT NOT NULL UNIQUE,
        key_digest {blob} NOT NULL UNIQUE,
        created_s {float} NOT NULL,
        expires_s {float} NOT NULL,
        status TEXT NOT NULL,
        settings TEXT NOT NULL,
        outcome TEXT,
        owner {integer} NOT NULL
    )
    """,
    "CREATE INDEX open_sessions ON sessions (expires_s) WHERE status = 'open'",
    """
    CREATE TABLE messages (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        node {integer} NOT NULL,
        parent {integer},
        sampled {integer} NOT NULL,
        message TEXT NOT NULL,
        delivered TEXT,
        PRIMARY KEY (session, node)
    )
    """,
    """
    CREATE TABLE turns (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        number {integer} NOT NULL,
        choice {integer} NOT NULL,
        tree {integer} NOT NULL,
        prompt_node {integer} NOT NULL,
        reply_node {integer} NOT NULL,
        tools_key TEXT NOT NULL,
        options TEXT NOT NULL,
        given_parent_node {integer},
        given_parent_offset {integer},
        given_origin TEXT,
        given_ids {blob},
        given_message_indices {blob},
        given_images TEXT,
        parent_node {integer} NOT NULL,
        parent_offset {integer} NOT NULL,
        completion_ids {blob} NOT NULL,
        rollout_logprobs {blob} NOT NULL,
        version_spans {blob} NOT NULL,
        finish_reason TEXT NOT NULL,
        temperature {float} NOT NULL,
        continued TEXT,
        fork TEXT,
        refusal TEXT,
        tolerances TEXT NOT NULL,
        request_digest {blob} NOT NULL,
        idempotency_key TEXT,
        answer_id TEXT NOT NULL,
        created_s {float} NOT NULL,
        kept_ids {blob},
        kept_sizes {blob},
        policy TEXT NOT NULL,
        sampling TEXT NOT NULL,
        PRIMARY KEY (session, number, choice)
    )
    """,
    """
    CREATE TABLE counters (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        name TEXT NOT NULL,
        total {integer} NOT NULL,
        PRIMARY KEY (session, name)
    )
    """,
    "CREATE TABLE blobs (sha256 {blob} PRIMARY KEY, data {blob} NOT NULL)",
    """
    CREATE TABLE session_blobs (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        sha256 {blob} NOT NULL REFERENCES blobs,
        PRIMARY KEY (session, kind, name)
    )
    """,
    "CREATE INDEX blob_sessions ON session_blobs (sha256)",
    """
    CREATE TABLE streams (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        piece {integer} NOT NULL,
        answer_id TEXT NOT NULL,
        history {blob} NOT NULL,
        message TEXT NOT NULL,
        PRIMARY KEY (session, piece)
    )
    """,
    """
    CREATE TABLE conversations (
        session {integer} NOT NULL REFERENCES sessions ON DELETE CASCADE,
        name TEXT NOT NULL,
        content TEXT NOT NULL,
        PRIMARY KEY (session, name)
    )
    """,
)
"""Arrays are blobs of little-endian int32 or float32, JSON is TEXT, and `blobs` has images and tools. `kept_ids` of a
turn are the ids that its ids were sampled from, and `kept_sizes` how many at each; null if none are known; what changed
its logits is in `sampling`. `streams`
has pieces of replies that are streamed, and of those whose streams broke, and `conversations` those of Responses.
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1,)
"""The statements that make version k + 1 of version k; version 0 is an empty database. Only ever appended to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of one kind of store."""

    content: str
    """What they have, as errors name it."""
    program: str
    """Which program writes them."""
    file: str
    """Its name in a folder."""
    schema: str
    """In PostgreSQL, where several kinds share a database."""
    locks: int
    """The first half of the names of the advisory locks in PostgreSQL, which all users of a database share."""
    is_shared: bool
    """Whether several processes may use them in PostgreSQL, each as an owner."""
    migrations: Sequence[Sequence[str]]
    """The statements that make version k + 1 of version k, where types are {key}, {integer}, {float} and {blob}."""
    revision: str
    """A query whose one row is another one after each change."""


SESSION_TABLES = Tables(
    content="sessions",
    program="gateway",
    file="sessions.sqlite3",
    schema="unbroken",
    locks=0x756E6272,
    is_shared=True,
    migrations=MIGRATIONS,
    revision="SELECT (SELECT COUNT(*) FROM turns), (SELECT MAX(created_s) FROM turns), "
    "COUNT(*), MAX(session), COUNT(*) FILTER (WHERE status = 'open'), COUNT(outcome) FROM sessions",
)


def find_statements(version: int, tables: Tables, *, names: Mapping[str, str], place: str) -> list[str]:
    """The statements that make our version of a database of `version`, with a database's `names` of types.

    Raises:
        StoreError: the database at `place` is of a later version than we know.
    """
    _check_known(version, tables, place)
    return [statement.format_map(names) for step in tables.migrations[version:] for statement in step]


def check_version(version: int, tables: Tables, *, place: str) -> None:
    """Raise `StoreError` if a database of `version` at `place` cannot be read as it is."""
    _check_known(version, tables, place)
    if version < len(tables.migrations):
        raise StoreError(
            f"{place} has {tables.content} of schema version {version}, and this release reads version "
            f"{len(tables.migrations)}: a {tables.program} of this release brings them up to date when it starts with "
            "this store"
        )


def _check_known(version: int, tables: Tables, place: str) -> None:
    if version > len(tables.migrations):
        raise StoreError(
            f"{place} has {tables.content} of schema version {version}, and this release knows versions up to "
            f"{len(tables.migrations)}: use the release that wrote them, or a later one"
        )


SESSION_COLUMNS = ("session_id", "key_digest", "created_s", "expires_s", "status", "settings", "outcome")
MESSAGE_COLUMNS = ("node", "parent", "sampled", "message", "delivered")
STREAM_COLUMNS = ("piece", "answer_id", "history", "message")
TURN_COLUMNS = (
    *("number", "choice", "tree", "prompt_node", "reply_node", "tools_key", "options"),
    *("given_parent_node", "given_parent_offset", "given_origin"),
    *("given_ids", "given_message_indices", "given_images"),
    *("parent_node", "parent_offset"),
    *("completion_ids", "rollout_logprobs", "version_spans", "finish_reason", "temperature"),
    *("continued", "fork", "refusal", "tolerances"),
    *("request_digest", "idempotency_key", "answer_id", "created_s"),
    *("kept_ids", "kept_sizes"),
    *("policy", "sampling"),
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


def encode_stream(record: StreamRecord) -> tuple[Any, ...]:
    """The values of `STREAM_COLUMNS`."""
    return record.piece, record.answer_id, record.history, encode_json(record.message)


def decode_stream(row: Sequence[Any]) -> StreamRecord:
    """The inverse of `encode_stream`."""
    piece, answer_id, history, message = row
    return StreamRecord(piece=piece, answer_id=answer_id, history=bytes(history), message=json.loads(message))


def encode_turn(record: TurnRecord) -> tuple[Any, ...]:
    """The values of `TURN_COLUMNS`."""
    sequence = record.sequence
    if sequence.routed_experts is not None:
        raise InvariantError("routed_experts are not stored with a session: sample its turns without them")
    spans = [(span.start, span.stop, span.policy_version) for span in sequence.version_spans]
    kept = sequence.kept_ids
    if sequence.controls != LogitControls.from_json(record.sampling):
        raise InvariantError(f"sampling must have the turn's controls, {sequence.controls}, got {record.sampling}")
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
        *((None, None) if kept is None else (_to_bytes(kept.token_ids, _INT), _to_bytes(kept.sizes, _INT))),
        *(record.policy, encode_json(record.sampling)),
    )


def decode_turn(row: Sequence[Any]) -> TurnRecord:
    """The inverse of `encode_turn`."""
    values = dict(zip(TURN_COLUMNS, row, strict=True))
    sampling = json.loads(values["sampling"])
    parent = _decode_position(values["parent_node"], values["parent_offset"])
    assert parent is not None
    plain = ("number", "choice", "tree", "prompt_node", "reply_node", "tools_key", "continued", "fork", "refusal")
    return TurnRecord(
        **{name: values[name] for name in (*plain, "idempotency_key", "answer_id", "created_s", "policy")},
        options=json.loads(values["options"]),
        sampling=sampling,
        given=_decode_given(values),
        parent=parent,
        sequence=_decode_sequence(values, sampling),
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


def _decode_sequence(values: Mapping[str, Any], sampling: Mapping[str, Any]) -> SampledSequence:
    spans = _to_array(values["version_spans"], _INT).reshape(-1, 3).tolist()
    return SampledSequence(
        controls=LogitControls.from_json(sampling),
        completion_ids=_to_array(values["completion_ids"], _INT),
        rollout_logprobs=_to_array(values["rollout_logprobs"], _FLOAT),
        finish_reason=FinishReason(values["finish_reason"]),
        version_spans=tuple(VersionSpan(start=a, stop=b, policy_version=version) for a, b, version in spans),
        temperature=values["temperature"],
        kept_ids=None
        if values["kept_ids"] is None
        else KeptIds.of_sizes(_to_array(values["kept_ids"], _INT), _to_array(values["kept_sizes"], _INT)),
    )


def _encode_position(position: Position | None) -> tuple[int | None, int | None]:
    return (None, None) if position is None else (position.node, position.offset)


def _decode_position(node: int | None, offset: int | None) -> Position | None:
    return None if node is None or offset is None else Position(node=node, offset=offset)


def _to_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _to_array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="), copy=False)
