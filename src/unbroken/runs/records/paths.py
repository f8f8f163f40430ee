"""The ids of a path as plain JSON: what each is, where it comes from, and what it was sampled with; and a session."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.ledger.nodes import BridgeKind, Path
from unbroken.ledger.records import SessionRecord, SessionStatus, StoredSession, TurnRecord
from unbroken.ledger.tree import Conversations
from unbroken.messages import ToolSchema
from unbroken.rendering.base import TEMPLATE
from unbroken.types import SampledSequence

_CUTTING = frozenset({"top_k", "top_p", "min_p", "structured_output"})
"""Sampling parameters by which ids are sampled from some only."""


def describe_path(path: Path) -> dict[str, Any]:
    """The keys of a row that say which ids there are, and where each comes from."""
    indices = path.message_indices
    return {
        "token_ids": path.token_ids.tolist(),
        "segments": [
            {"start": each.start, "stop": each.stop, "origin": each.origin.value, "node": each.node}
            for each in path.segments
        ],
        "message_indices": find_runs(indices, where=indices != TEMPLATE),
        "rollout_logprobs": to_floats(path.rollout_logprobs[path.sampled_mask]),
        "policy_versions": find_runs(path.policy_versions, where=path.sampled_mask),
    }


def describe_branch(path: Path, conversations: Conversations) -> dict[str, Any]:
    """The same keys for a branch of a session, whose indices are places in `conversations.messages`, and its own turns,
    messages and tools: those of its last turn, as a request with other tools begins another branch.
    """
    turns, described = conversations.find_turns(path), describe_path(path)
    messages = conversations.find_messages(turns[-1])
    spans = [[start, stop, messages[n]] for start, stop, n in described["message_indices"] if n < len(messages)]
    own = {"message_indices": spans, "turns": turns, "messages": messages, "tools": conversations.tools[turns[-1]]}
    return {**described, **own}


def describe_session(stored: StoredSession) -> dict[str, Any]:
    """A gateway's session as the record of a rollout, without its rows."""
    record, turns = stored.record, stored.turns
    outcome = record.outcome or {}
    return {
        "kind": "trajectory",
        "group": None,
        "trajectory": record.session_id,
        "status": _find_status(record),
        "error": None,
        "reward": outcome.get("reward"),
        "reward_parts": outcome.get("metrics") or {},
        "wall_time_s": round(turns[-1].created_s - record.created_s, 3) if turns else None,
        "counters": stored.counters,
        "tools": _find_tools(stored),
        "messages": [message.message for message in stored.messages],
        "turns": [_describe_turn(stored, turn) for turn in turns],
    }


def _find_tools(stored: StoredSession) -> list[ToolSchema]:
    """The tools of all turns, each once: the last turn may be that of another agent, which had none."""
    tools: list[ToolSchema] = []
    for key in dict.fromkeys(turn.tools_key for turn in stored.turns):
        tools += [tool for tool in stored.tools.get(key, ()) if tool not in tools]
    return tools


def _find_status(record: SessionRecord) -> str:
    """How the attempt ended, as it was reported; else the state of the session."""
    status = (record.outcome or {}).get("status")
    return status if record.status is SessionStatus.FINISHED and isinstance(status, str) else record.status.value


def _describe_turn(stored: StoredSession, turn: TurnRecord) -> dict[str, Any]:
    return {
        "reward": None,
        "finish_reason": turn.sequence.finish_reason.value,
        "cut_by": None,
        "bridge": turn.continued == BridgeKind.DERIVED,
        "refusal": turn.refusal,
        "fork": turn.fork,
        "branch": _find_branch(turn),
        "message": stored.messages[turn.reply_node].message,
        "call_statuses": [],
        "closing": None,
        "times": None,
        "tolerances": turn.tolerances,
        "created_s": round(turn.created_s - stored.record.created_s, 3),
        **describe_sampled(turn.policy, turn.sequence, sampling=turn.sampling),
    }


def describe_sampled(
    policy: str | None, sequence: SampledSequence, *, sampling: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The keys of a turn that say how many ids were sampled, how many were given inside, by whom, which versions,
    what changed the logits, and whether the ids were sampled from some only (`SampledSequence.kept_ids`): None where no
    kept ids came, because nothing was cut, or because nobody asked for them. `sampling` decides that where it is known:
    sessions need not record kept ids, but have the parameters that were asked for.
    """
    counts = {"num_sampled": sequence.num_sampled, "num_given": sequence.num_given}
    controls = None if sequence.controls is None else sequence.controls.to_json()
    versions = find_runs(sequence.policy_versions, where=sequence.sampled_mask)
    is_cut = sequence.kept_ids is not None or (None if sampling is None else not _CUTTING.isdisjoint(sampling))
    return {**counts, "controls": controls, "is_cut": is_cut, "policy": policy, "policy_versions": versions}


def _find_branch(turn: TurnRecord) -> str | None:
    """Why a turn may begin a branch without a fork; the fork has its own reason."""
    if turn.fork is not None:
        return None
    if turn.given is None:
        return "sampled_again"
    return "new_conversation" if turn.continued is None else "continued_again"


def cut_path(path: Path, end: int) -> Path:
    """The first `end` ids of a path, without its images and experts."""
    return Path(
        token_ids=path.token_ids[:end],
        sampled_mask=path.sampled_mask[:end],
        rollout_logprobs=path.rollout_logprobs[:end],
        policy_versions=path.policy_versions[:end],
        message_indices=path.message_indices[:end],
        segments=tuple(replace(each, stop=min(each.stop, end)) for each in path.segments if each.start < end),
        images=(),
        temperatures=path.temperatures,
    )


def find_runs(values: NDArray[Any], *, where: NDArray[np.bool_]) -> list[list[Any]]:
    """[start, stop, value] of neighbours that are equal, where a mask is true."""
    if not where.any():
        return []
    changes = values[1:] != values[:-1]
    if where is not values:
        changes |= where[1:] != where[:-1]
    bounds = [0, *(changes.nonzero()[0] + 1).tolist(), len(values)]
    pairs = itertools.pairwise(bounds)
    return [[start, stop, _plain(values[start])] for start, stop in pairs if where[start]]


def to_floats(values: NDArray[np.float32]) -> list[float]:
    """The shortest numbers that are the same in float32."""
    return [float(text) for text in values.astype(np.float32).astype(str)]


def _plain(value: Any) -> Any:
    return float(str(value)) if isinstance(value, np.floating) else value.item()
