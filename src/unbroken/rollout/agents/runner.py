"""Groups of attempts by an agent: sessions of one task at a gateway, as trajectories with the same tree and ids."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from unbroken.counters import Counters, Event, add_effort
from unbroken.errors import (
    EngineError,
    InvalidInputError,
    InvariantError,
    RewardError,
    SessionEndedError,
    StoreError,
)
from unbroken.ledger.nodes import ForkReason, Origin, Position
from unbroken.ledger.numbers import to_finite_float32
from unbroken.ledger.records import ImageRecord
from unbroken.ledger.tree import Conversations, TokenTree
from unbroken.messages import Message, ToolSchema, get_reasoning, get_text
from unbroken.rendering.base import ParsedResponse, ParsedToolCall, ToolCallStatus
from unbroken.rollout.agents.session import Agent, AgentOutcome, AgentSession
from unbroken.rollout.failures import must_propagate, unwrap_group
from unbroken.rollout.limits import Limit, Limits
from unbroken.rollout.seeds import derive_seed
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus, Turn
from unbroken.types import (
    NO_VERSION,
    EncodedImage,
    FinishReason,
    LogitControls,
    SampledSequence,
    SamplingParams,
    VersionSpan,
    read_kept_ids,
)

_ABANDON_S = 10.0
"""How long to wait for the session of a cancelled attempt, and to try to delete it."""


class SessionGateway(Protocol):
    """The control API of a gateway (`unbroken.client`)."""

    async def create(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """`POST /v1/sessions`."""
        ...

    async def finish(self, session_id: str, outcome: Mapping[str, Any]) -> Mapping[str, Any]:
        """`POST /v1/sessions/{id}/finish`; `SessionEndedError` if it has ended in another way."""
        ...

    async def get(self, session_id: str) -> Mapping[str, Any]:
        """`GET /v1/sessions/{id}`."""
        ...

    async def tree(self, session_id: str) -> Mapping[str, Any]:
        """`GET /v1/sessions/{id}/tree`."""
        ...

    async def image(self, session_id: str, sha256: str) -> bytes:
        """`GET /v1/sessions/{id}/images/{sha256}`."""
        ...

    async def delete(self, session_id: str) -> None:
        """`DELETE /v1/sessions/{id}`."""
        ...


async def run_agent_group(
    agent: Agent,
    n: int,
    *,
    gateway: SessionGateway,
    task: Mapping[str, Any],
    sampling: SamplingParams,
    limits: Limits,
    is_scored_later: bool = False,
    group_id: str | None = None,
) -> TrajectoryGroup:
    """Let an agent attempt one task n times concurrently, each in its own session.

    The sampling parameters are forced on every request of the sessions, but an agent may ask for fewer tokens; with
    `sampling.seed` each session has a seed derived from it. An attempt that takes longer than `limits.timeout_s`, not
    counting the time in which a request of it is queued or sampled, or its container is made (`Preparation`), is
    cancelled, as TIMEOUT with the reward 0. An exception ends only its attempt, as FAILED. What an attempt has recorded
    is in its trajectory in every case. If the call is cancelled, the sessions are deleted, and their requests aborted.

    Raises:
        InvalidInputError: `limits.thinking_tokens` is set: an agent's requests have budgets of their own.
        ServerError: the gateway cannot be reached, or refuses.
    """
    if limits.thinking_tokens is not None:
        raise InvalidInputError(
            f"rollouts.limits.thinking_tokens must be left out with an agent, got {limits.thinking_tokens}: its own "
            "requests say how much it thinks (thinking_token_budget, thinking.budget_tokens, reasoning.max_tokens)"
        )
    name = group_id or uuid.uuid4().hex
    try:
        async with asyncio.TaskGroup() as tasks:
            attempts = [
                tasks.create_task(
                    _run_attempt(
                        agent,
                        gateway,
                        task,
                        replace(sampling, seed=derive_seed(sampling.seed, k)),
                        limits,
                        is_scored_later=is_scored_later,
                        trajectory_id=f"{name}/{k}",
                    )
                )
                for k in range(n)
            ]
    except BaseExceptionGroup as failed:  # of the gateway, whose first error has cancelled the others
        raise failed.exceptions[0] from failed.exceptions[0].__cause__
    return TrajectoryGroup(group_id=name, trajectories=tuple(attempt.result() for attempt in attempts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    status: TrajectoryStatus
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    failure: str | None = None
    """`AgentOutcome.failure`"""


_FORCED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "bad_words_ids",
    "max_tokens",
    "seed",
)
"""Sampling parameters of a session: a trainer knows only the distribution that the run has."""


async def _run_attempt(
    agent: Agent,
    gateway: SessionGateway,
    task: Mapping[str, Any],
    sampling: SamplingParams,
    limits: Limits,
    *,
    is_scored_later: bool,
    trajectory_id: str,
) -> Trajectory:
    created = await _create(
        gateway,
        {
            "metadata": {"trajectory": trajectory_id},
            "sampling": {
                **{name: getattr(sampling, name) for name in _FORCED},
                **({"return_kept_ids": True} if sampling.return_kept_ids else {}),
            },
            "limits": {"turns": limits.max_turns, "tokens": limits.max_tokens},
        },
    )
    session = AgentSession(
        session_id=created["session_id"],
        api_key=created["api_key"],
        openai_base_url=created["openai_base_url"],
        anthropic_base_url=created["anthropic_base_url"],
        model=created["model"],
        task=task,
        trajectory_id=trajectory_id,
    )
    try:
        return await _record_attempt(agent, gateway, session, limits, is_scored_later=is_scored_later)
    except asyncio.CancelledError:  # nobody wants it: the session would be sampled on, and stay open until it expires
        await asyncio.shield(_abandon(gateway, session.session_id))
        raise


async def _create(gateway: SessionGateway, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Create a session, or, if that is cancelled, delete it once it is there: the gateway may have made it already."""
    creating = asyncio.create_task(gateway.create(settings))

    async def abandon() -> None:
        with suppress(EngineError, StoreError, TimeoutError):
            async with asyncio.timeout(_ABANDON_S):
                created = await creating
            await _abandon(gateway, created["session_id"])

    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        await asyncio.shield(abandon())
        raise


async def _record_attempt(
    agent: Agent, gateway: SessionGateway, session: AgentSession, limits: Limits, *, is_scored_later: bool
) -> Trajectory:
    started = time.perf_counter()
    ending = await _attempt(agent, gateway, session, limits)
    sampled = await gateway.get(session.session_id)  # before it ends: the times are not stored
    if ending.failure is not None and sampled["num_turns"] == 0:
        ending = _Ending(status=TrajectoryStatus.FAILED, error=ChildProcessError(ending.failure))
    outcome = {"status": ending.status.value, "reward": ending.reward, "metrics": dict(ending.metrics)}
    finished = await _finish(gateway, session.session_id, outcome)
    ending = _complete(ending, finished.get("outcome") or {}, is_scored_later=is_scored_later)
    looked, tree = await asyncio.gather(gateway.get(session.session_id), gateway.tree(session.session_id))
    images = {digest: EncodedImage(await gateway.image(session.session_id, digest)) for digest in _find_images(tree)}
    recorded = _read_session(tree, looked["counters"], images=images)
    add_effort(recorded.tree.num_sampled)
    recorded.counters.count(Event.STATUS, ending.status)
    if ending.status is TrajectoryStatus.TIMEOUT:
        recorded.counters.count(Event.LIMIT, Limit.TIME)
    return Trajectory(
        trajectory_id=session.trajectory_id,
        tree=recorded.tree,
        turns=recorded.turns,
        messages=recorded.messages,
        tools=recorded.tools,
        conversations=recorded.conversations,
        status=ending.status,
        reward=ending.reward,
        reward_parts=ending.metrics,
        counters=recorded.counters,
        error=ending.error,
        wall_time_s=time.perf_counter() - started,
        engine_s=sampled.get("engine_s", 0.0),
        queue_s=sampled.get("queue_s"),
    )


async def _abandon(gateway: SessionGateway, session_id: str) -> None:
    with suppress(EngineError, StoreError, TimeoutError):  # it then ends when it expires
        async with asyncio.timeout(_ABANDON_S):
            await gateway.delete(session_id)


async def _finish(gateway: SessionGateway, session_id: str, outcome: Mapping[str, Any]) -> Mapping[str, Any]:
    """End a session, unless it was ended already, with the reward of its outcome."""
    try:
        return await gateway.finish(session_id, outcome)
    except SessionEndedError:
        return await gateway.get(session_id)


async def _attempt(agent: Agent, gateway: SessionGateway, session: AgentSession, limits: Limits) -> _Ending:
    clock = asyncio.timeout(None)
    try:
        async with clock, asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_limit_time(clock, gateway, session, limits.timeout_s))
            returned = await agent(session)
            watch.cancel()
        outcome = returned if isinstance(returned, AgentOutcome) else AgentOutcome(reward=returned)
        reward = outcome.reward
        if reward is not None:
            reward = to_finite_float32(reward, name="the agent's reward", error=RewardError)
        metrics = {
            name: to_finite_float32(value, name=f"the agent's metric {name!r}", error=RewardError)
            for name, value in outcome.metrics.items()
        }
        return _Ending(status=TrajectoryStatus.COMPLETED, reward=reward, metrics=metrics, failure=outcome.failure)
    except BaseException as raised:
        if isinstance(raised, TimeoutError) and clock.expired():
            return _Ending(status=TrajectoryStatus.TIMEOUT, reward=0.0)
        if must_propagate(raised):
            raise
        return _Ending(status=TrajectoryStatus.FAILED, error=unwrap_group(raised))


async def _limit_time(clock: asyncio.Timeout, gateway: SessionGateway, session: AgentSession, limit_s: float) -> None:
    """Let the clock expire once the attempt took so long, without its preparation and while no request was sampled."""
    started, engine_s, prepared = time.perf_counter(), 0.0, session.preparation
    while (left_s := limit_s + engine_s + prepared.read() - (time.perf_counter() - started)) > 0:
        await asyncio.sleep(left_s)
        with suppress(EngineError, StoreError):
            engine_s = (await gateway.get(session.session_id)).get("engine_s", 0.0)
    clock.reschedule(asyncio.get_running_loop().time())


def _complete(ending: _Ending, outcome: Mapping[str, Any], *, is_scored_later: bool) -> _Ending:
    """The ending with the session's reward, if the agent did not return one."""
    if ending.status is TrajectoryStatus.TIMEOUT and (given := outcome.get("reward")) is not None:
        return replace(ending, reward=to_finite_float32(given, name="the session's reward", error=RewardError))
    if ending.status is not TrajectoryStatus.COMPLETED or ending.reward is not None:
        return ending
    given = outcome.get("reward")
    if given is None and is_scored_later:
        given = 0.0
    if given is None:
        return replace(ending, status=TrajectoryStatus.UNSCORED)
    return replace(ending, reward=to_finite_float32(given, name="the session's reward", error=RewardError))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedSession:
    """What a session has recorded."""

    tree: TokenTree
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """Of the first conversation: the path to its newest reply."""
    tools: tuple[ToolSchema, ...]
    """Of the newest turn of that conversation."""
    conversations: Conversations
    counters: Counters


def _find_images(recorded: Mapping[str, Any]) -> set[str]:
    """The SHA-256 of all images that a session has in its prompts."""
    return {image["sha256"] for node in recorded["nodes"] for image in node["images"]}


def _read_session(
    recorded: Mapping[str, Any], counters: Mapping[str, int], *, images: Mapping[str, EncodedImage]
) -> _RecordedSession:
    """Read the answer of `/v1/sessions/{id}/tree` and the session's counters; `images` are those of `_find_images`.

    A node becomes the node of the same number. Raises `InvariantError` if the answer contradicts itself.
    """
    tree = TokenTree()
    sequences: dict[int, SampledSequence] = {}
    finished = {turn["end"]["node"]: FinishReason(turn["finish_reason"]) for turn in recorded["turns"]}
    for number, node in enumerate(recorded["nodes"]):
        sequence = _add_node(tree, node, finished.get(number), images)
        if sequence is not None:
            sequences[number] = sequence
    given, conversations = recorded["messages"], _read_conversations(recorded, images)
    turns = tuple(_read_turn(turn, given[turn["reply_message"]]["message"], sequences) for turn in recorded["turns"])
    of_first = [turn for turn, reply in enumerate(conversations.replies) if given[reply]["conversation"] == 0]
    main = conversations.find_messages(of_first[-1]) if of_first else []
    counted = Counters()
    for name, times in counters.items():
        counted.add(name, times)
    return _RecordedSession(
        tree=tree,
        turns=turns,
        messages=tuple(cast(Message, conversations.messages[number]) for number in main),
        tools=tuple(conversations.tools[of_first[-1]]) if of_first else (),
        conversations=conversations,
        counters=counted,
    )


def _read_conversations(recorded: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> Conversations:
    messages, turns = recorded["messages"], recorded["turns"]
    return Conversations(
        messages=tuple(_with_images(message["message"], images) for message in messages),
        parents=tuple(message["parent"] for message in messages),
        turn_of_node={turn["end"]["node"]: number for number, turn in enumerate(turns)},
        replies=tuple(turn["reply_message"] for turn in turns),
        tools=tuple(tuple(recorded["tools"][turn["tools"]]) for turn in turns),
    )


def _add_node(
    tree: TokenTree, node: Mapping[str, Any], finish_reason: FinishReason | None, images: Mapping[str, EncodedImage]
) -> SampledSequence | None:
    parent = None if node["parent"] is None else Position(**node["parent"])
    if node["origin"] != Origin.SAMPLED.value:
        tree.add_given(
            node["token_ids"],
            Origin(node["origin"]),
            parent=parent,
            message_indices=np.asarray(node["message_indices"]),
            images=[ImageRecord(**image).to_span(images[image["sha256"]]) for image in node["images"]],
        )
        return None
    if parent is None or finish_reason is None:
        raise InvariantError("a sampled node of a session must have a parent and a turn")
    sequence = SampledSequence(
        completion_ids=node["token_ids"],
        rollout_logprobs=node["rollout_logprobs"],
        finish_reason=finish_reason,
        version_spans=_to_spans(node["policy_versions"]),
        temperature=node["temperature"],
        kept_ids=read_kept_ids(node.get("kept_ids")),
        controls=LogitControls.from_json(node.get("controls") or {}),
    )
    tree.add_sampled(sequence, parent=parent)
    return sequence


def _to_spans(versions: Any) -> tuple[VersionSpan, ...]:
    values = np.asarray(versions, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    stops = [*starts[1:], len(values)]
    return tuple(
        VersionSpan(start=start, stop=stop, policy_version=int(values[start]))
        for start, stop in zip(starts, stops, strict=True)
        if values[start] != NO_VERSION
    )


def _read_turn(turn: Mapping[str, Any], message: Message, sequences: Mapping[int, SampledSequence]) -> Turn:
    end = Position(**turn["end"])
    return Turn(
        prompt_end=Position(**turn["prompt_end"]),
        end=end,
        sequence=sequences[end.node],
        message=message,
        parsed=_read_message(message),
        bridge=None,
        fork=None if turn["fork"] is None else ForkReason(turn["fork"]),
        cut_by=None,
        policy=turn.get("policy"),
    )


def _read_message(message: Message) -> ParsedResponse:
    """What was parsed, apart from its place among the ids and from failed calls: the session has counted those."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments: Any = call["function"]["arguments"]
        calls.append(
            ParsedToolCall(
                raw=json.dumps(arguments, ensure_ascii=False),
                status=ToolCallStatus.OK,
                span=(0, 0),
                name=call["function"]["name"],
                arguments=arguments,
                call_id=call["id"],
            )
        )
    return ParsedResponse(
        content=get_text(message.get("content")), reasoning=get_reasoning(message) or "", tool_calls=tuple(calls)
    )


def _with_images(message: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        parts = [{**part, "image": images[part["sha256"]]} if part["type"] == "image" else part for part in content]
        message = {**message, "content": parts}
    return cast(Message, message)
