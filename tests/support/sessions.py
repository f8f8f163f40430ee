"""Sessions with random turns for tests of stores, and a way to compare records, whose arrays have no truth value."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.records import GivenRecord, ImageRecord, MessageRecord, SessionRecord, TurnCommit, TurnRecord
from unbroken.ledger.store import SessionStore, open_database
from unbroken.ledger.store.sql import SqlSessionStore
from unbroken.ledger.store.tables import MIGRATIONS, SESSION_TABLES
from unbroken.types import FinishReason, SampledSequence, VersionSpan, token_ids

WITH_TITLE = (*MIGRATIONS, ("ALTER TABLE sessions ADD COLUMN title TEXT NOT NULL DEFAULT 'untitled'",))
"""The migrations of a later release."""
BROKEN = (*WITH_TITLE, ("DELETE FROM sessions", "DROP TABLE missing"))
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)


def open_later_store(location: str, migrations: Sequence[Sequence[str]] = WITH_TITLE) -> SessionStore:
    """Open a store as a release with these migrations does."""
    return SqlSessionStore(open_database(location, dataclasses.replace(SESSION_TABLES, migrations=migrations)))


def digest_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def make_session(session_id: str = "s", *, expires_s: float = 2e9, **settings: Any) -> SessionRecord:
    return SessionRecord(
        session_id=session_id,
        key_digest=digest_key(f"key of {session_id}"),
        created_s=1.5e9,
        expires_s=expires_s,
        settings=settings,
    )


def make_turn(number: int = 0, *, num_ids: int = 5, choice: int = 0, image: bytes | None = None) -> TurnRecord:
    """Turn `number` of a line in one tree: given ids on nodes 0, 2, ..., sampled ones on nodes 1, 3, ..., each >= 2."""
    rng = np.random.default_rng(100 * number + choice)
    images = ()
    if image is not None:
        sha256 = hashlib.sha256(image).hexdigest()
        images = (ImageRecord(offset=0, length=2, placeholder_id=9, sha256=sha256, settings='{"max_pixels":64}'),)
    given = GivenRecord(
        parent=Position(node=2 * number - 1, offset=num_ids) if number else None,
        origin=Origin.BRIDGE if number else Origin.PROMPT,
        token_ids=token_ids(rng.integers(0, 150_000, num_ids)),
        message_indices=rng.integers(-1, 5, num_ids),
        images=images,
    )
    cut = num_ids // 2
    spans = (VersionSpan(start=0, stop=cut, policy_version=3), VersionSpan(start=cut, stop=num_ids, policy_version=4))
    return TurnRecord(
        number=number,
        choice=choice,
        tree=0,
        prompt_node=2 * number,
        reply_node=2 * number + 1,
        tools_key="tools",
        options={"enable_thinking": False},
        given=given if choice == 0 else None,
        parent=Position(node=2 * number, offset=num_ids),
        sequence=SampledSequence(
            completion_ids=token_ids(rng.integers(0, 150_000, num_ids)),
            rollout_logprobs=-rng.exponential(size=num_ids).astype(np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=spans,
            temperature=0.7,
        ),
        continued="derived" if number else None,
        fork=None,
        refusal="underivable",
        tolerances=("stripped_reasoning", "call_ids"),
        request_digest=bytes(range(32)),
        idempotency_key=f"retry-{number}",
        answer_id=f"answer-{number}-{choice}",
        policy="tinker://run/sampler_weights/a" if number else "model",
        sampling={"top_p": 0.5} if number else {},
        created_s=1.6e9 + number / 8,
    )


def make_commit(session_id: str = "s", number: int = 0, *, num_ids: int = 5, text: str = "hi") -> TurnCommit:
    """A user's message, and the turn that answers it."""
    user = MessageRecord(
        node=2 * number,
        parent=2 * number - 1 if number else None,
        message={"role": "user", "content": text},
        sampled=False,
    )
    reply = MessageRecord(
        node=2 * number + 1,
        parent=2 * number,
        message={"role": "assistant", "content": "ok"},
        sampled=True,
        delivered={"role": "assistant", "content": "o"} if number else None,
    )
    return TurnCommit(
        session_id=session_id,
        messages=(user, reply),
        tools={"tools": TOOLS} if number == 0 else {},
        turns=(make_turn(number, num_ids=num_ids),),
        counters={"bridges/derived": 1} if number else {},
    )


def to_plain(value: Any) -> Any:
    """A record as lists and dictionaries, with the type of each array."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
