"""The control API of sessions, for whoever starts agents and trains on what they did. It needs the server's key."""

from __future__ import annotations

from asyncio import wrap_future
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query, Request, Response
from pydantic import Field

from unbroken.errors import SamplingError
from unbroken.gateway.session import CONTROLS, SessionSettings
from unbroken.gateway.sessions import Sessions
from unbroken.gateway.state import RecordedTurn, SessionState, name_images
from unbroken.ledger.nodes import Node
from unbroken.ledger.records import ImageRecord, SessionRecord, SessionStatus
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import sum_queue_s
from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import StrictBody
from unbroken.server.http.errors import HttpError, check_size
from unbroken.server.http.json import json_response, negotiated_response, note_ignored
from unbroken.server.wire.openai import SamplingFields, list_version_spans
from unbroken.types import ImageSpan, KeptIds, TrainingSample, write_kept_ids

router = Routes(Access.CLIENT)
_MAX_REWARD = float(np.finfo(np.float32).max)
"""Advantages are float32."""


class CreateBody(SessionSettings):
    """A session's settings, and how long it may live."""

    ttl_s: float | None = Field(default=None, gt=0)
    """Seconds until it expires; by default the gateway's."""


class FinishSessionBody(StrictBody):
    """How an attempt ended."""

    reward: float | None = Field(default=None, ge=-_MAX_REWARD, le=_MAX_REWARD)
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    """Further numbers of the attempt, by name."""
    status: Literal["completed", "failed", "timeout", "aborted", "unscored"] = "completed"


@router.post(
    "/v1/sessions",
    summary="Create a session",
    response_description="`session_id`, `api_key`, `model`, `expires_at`; `openai_base_url`, `anthropic_base_url`, "
    "`gemini_base_url`",
)
async def _create_session(body: CreateBody, request: Request) -> Response:
    """Create a session. Give its key and one of its URLs, which contains the key, to an agent."""
    settings = SessionSettings.model_validate(body.model_dump(exclude={"ttl_s"}))
    context = get_context(request)
    await _check_settings(request, settings)
    policy = await context.policies.get(request, settings.policy)
    name = settings.policy or policy.name
    if not settings.follow:
        name = await context.policies.pin(request, policy)
        settings = settings.model_copy(update={"policy": name})
    created = await _get_sessions(request).create(settings, ttl_s=body.ttl_s)
    root = f"{str(request.base_url).rstrip('/')}/s/{created.api_key}"
    return json_response(
        {
            "session_id": created.record.session_id,
            "api_key": created.api_key,
            "openai_base_url": f"{root}/v1",
            "anthropic_base_url": root,
            "gemini_base_url": root,
            "model": name,
            "expires_at": created.record.expires_s,
        }
    )


@router.get("/v1/sessions", summary="List sessions", response_description="`sessions`, oldest first, and `has_more`")
async def _list_sessions(
    request: Request,
    status: Literal["open", "finished", "expired"] | None = None,
    after: str | None = None,
    limit: int = Query(default=100, ge=1, le=1000),
) -> Response:
    """List sessions without their turns; `after` is the last one of the page before."""
    found = await _get_sessions(request).list_records(
        status=None if status is None else SessionStatus(status), after=after, limit=limit + 1
    )
    return json_response(
        {"sessions": [_format_record(record) for record in found[:limit]], "has_more": len(found) > limit}
    )


@router.get("/v1/sessions/{session_id}", summary="A session", response_description="status, counters, turns and forks")
async def _get_session(session_id: str, request: Request) -> Response:
    """Look at a session."""
    sessions = _get_sessions(request)
    record, state, num_in_flight = await sessions.view(session_id)
    times = {
        "engine_s": sessions.get_engine_s(session_id),
        "queue_s": sum_queue_s(recorded.turn for recorded in state.turns),
    }
    return json_response({**_format_record(record), **_summarise(state), "in_flight": num_in_flight, **times})


@router.get(
    "/v1/sessions/{session_id}/samples",
    summary="Training rows",
    response_description="`samples`: a row for each branch; JSON, or the compact form if accepted",
)
async def _get_samples(session_id: str, request: Request, advantage: float | None = None) -> Response:
    """The rows to train on. Each sampled id is trained once. `advantage` is by default the reward, or 0 without one."""
    record, state, _ = await _get_sessions(request).view(session_id)
    reward = (record.outcome or {}).get("reward")
    used = advantage if advantage is not None else (0.0 if reward is None else float(reward))
    if not abs(used) <= _MAX_REWARD:
        raise HttpError(400, f"advantage must be finite in float32, got {used}", param="advantage")
    tree = state.tree.copy()  # turns may be recorded while it is read
    samples = await wrap_future(get_context(request).text_threads.submit(export_samples, tree, used))
    value = {"session_id": session_id, "reward": reward, "samples": [_format_sample(sample) for sample in samples]}
    return negotiated_response(request, value)


@router.get(
    "/v1/sessions/{session_id}/tree",
    summary="Everything that is recorded",
    response_description="`messages`, `tools` by key, `turns`, `nodes` of the token tree; JSON or the compact form",
)
async def _get_tree(session_id: str, request: Request) -> Response:
    """The messages, the turns, and the ids of a session."""
    _, state, _ = await _get_sessions(request).view(session_id)
    value = {
        "session_id": session_id,
        "messages": [
            {
                "node": node.number,
                "parent": node.parent,
                "conversation": node.conversation,
                "turn": node.turn,
                "message": name_images(node.message),
            }
            for node in state.forest.nodes
        ],
        "tools": state.tools,
        "turns": [_format_turn(recorded) for recorded in state.turns],
        "nodes": [_format_node(node) for node in state.tree.nodes],
    }
    return negotiated_response(request, value)


@router.get(
    "/v1/sessions/{session_id}/images/{sha256}",
    summary="An image of a session",
    response_description="the file's bytes",
)
async def _get_image(session_id: str, sha256: str, request: Request) -> Response:
    """The file of an image that the session's prompts or messages name by its SHA-256."""
    return Response(await _get_sessions(request).load_image(session_id, sha256), media_type="application/octet-stream")


@router.post("/v1/sessions/{session_id}/finish", summary="Finish a session", response_description="the session")
async def _finish_session(session_id: str, body: FinishSessionBody, request: Request) -> Response:
    """End a session, with its reward. It takes no request any more."""
    check_size(body.metrics, name="metrics")
    record = await _get_sessions(request).finish(session_id, body.model_dump(mode="json"))
    return json_response(_format_record(record))


@router.delete("/v1/sessions/{session_id}", summary="Delete a session", response_description="its id")
async def _delete_session(session_id: str, request: Request) -> Response:
    """Delete a session and all that it recorded."""
    await _get_sessions(request).delete(session_id)
    get_context(request).bodies.forget(session_id)
    return json_response({"session_id": session_id, "deleted": True})


async def _check_settings(request: Request, settings: SessionSettings) -> None:
    """Raise `HttpError` for settings with which every turn would be refused, and for metadata that are too long.

    Options that the template does not read are named in the header of the answer.
    """
    context = get_context(request)
    check_size(settings.metadata, name="metadata")
    sampling = SamplingFields(**settings.sampling.model_dump(exclude={"max_tokens", "return_kept_ids", *CONTROLS}))
    try:
        replace(sampling.to_params(end_ids=(), max_tokens=1, num_top_logprobs=0), **settings.sampling.controls)
    except SamplingError as error:
        raise HttpError(400, f"sampling.{error}", param="sampling") from None
    if (options := settings.template_options) is not None:
        context.check_options(options, name="template_options")
        await wrap_future(context.text_threads.submit(context.get_renderer, options))
        ineffective = await context.find_ineffective((), options)
        note_ignored(request, [name.replace("chat_template_kwargs", "template_options") for name in ineffective])


def _get_sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def _format_record(record: SessionRecord) -> dict[str, Any]:
    return {
        "session_id": record.session_id,
        "status": record.status.value,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "settings": record.settings,
        "outcome": record.outcome,
    }


def _summarise(state: SessionState) -> dict[str, Any]:
    forks = [
        {"turn": recorded.record.number, "reason": recorded.turn.fork.value}
        for recorded in state.turns
        if recorded.turn.fork is not None
    ]
    return {
        "num_turns": len(state.turns),
        "num_sampled_tokens": state.num_sampled,
        "num_conversations": state.forest.num_conversations,
        "counters": state.counters.as_dict(),
        "forks": forks,
    }


def _format_sample(sample: TrainingSample) -> dict[str, Any]:
    names = ("token_ids", "sampled_mask", "loss_mask", "rollout_logprobs", "policy_versions", "advantages")
    return {
        **{name: getattr(sample, name) for name in names},
        "temperature": sample.temperature,
        "images": [_format_span(span) for span in sample.images],
        **_format_kept(sample.kept_ids),
        **({"controls": [span.to_json() for span in sample.controls]} if sample.controls else {}),
    }


def _format_kept(kept: KeptIds | None) -> dict[str, Any]:
    return {} if kept is None else {"kept_ids": write_kept_ids(kept)}


def _format_turn(recorded: RecordedTurn) -> dict[str, Any]:
    record, turn = recorded.record, recorded.turn
    return {
        "number": record.number,
        "choice": record.choice,
        "prompt_message": record.prompt_node,
        "reply_message": record.reply_node,
        "prompt_end": asdict(turn.prompt_end),
        "end": asdict(turn.end),
        "fork": None if turn.fork is None else turn.fork.value,
        "tools": record.tools_key,
        "tolerances": record.tolerances,
        "finish_reason": turn.sequence.finish_reason.value,
        "answer_id": record.answer_id,
        "created_at": record.created_s,
        "policy": record.policy,
        "policy_versions": list_version_spans(turn.sequence),
        "sampling": record.sampling,
    }


def _format_node(node: Node) -> dict[str, Any]:
    return {
        "parent": None if node.parent is None else asdict(node.parent),
        "origin": node.origin.value,
        "token_ids": node.token_ids,
        "rollout_logprobs": node.rollout_logprobs,
        "policy_versions": np.asarray(node.policy_versions),
        "message_indices": node.message_indices,
        "images": [_format_span(span) for span in node.images],
        "temperature": node.temperature,
        **_format_kept(node.kept_ids),
        **({} if node.controls is None else {"controls": node.controls.to_json()}),
    }


def _format_span(span: ImageSpan) -> dict[str, Any]:
    return asdict(ImageRecord.from_span(span))
