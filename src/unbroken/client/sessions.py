"""The control API of a gateway's sessions (docs/gateway.md).

created = await client.sessions.create({"metadata": {"task": 4}, "sampling": {"temperature": 1.0}})
... an agent works with created["openai_base_url"] and created["api_key"] ...
await client.sessions.finish(created["session_id"], {"reward": 1.0})
rows = await client.sessions.samples(created["session_id"])
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, TypedDict
from urllib.parse import quote

from unbroken.client.calls import Calls
from unbroken.types import ControlSpan, EncodedImage, ImageSpan, TrainingSample, read_kept_ids

SessionStatus = Literal["open", "finished", "expired"]
_PAGE = 1000


class CreatedSession(TypedDict):
    """What an agent needs. Its key, which the URLs contain, opens turns in this session and nothing else."""

    session_id: str
    """A name, which opens nothing."""
    api_key: str
    """Returned only here, and in the URLs."""
    openai_base_url: str
    """It ends with `/v1`."""
    anthropic_base_url: str
    """SDKs add `/v1/messages`."""
    gemini_base_url: str
    """SDKs add `/v1beta/models/...`."""
    model: str
    expires_at: float
    """Unix time in seconds."""


class SessionSummary(TypedDict):
    """A session without its turns."""

    session_id: str
    status: SessionStatus
    created_at: float
    expires_at: float
    settings: dict[str, Any]
    """As it was created, with `metadata`."""
    outcome: dict[str, Any] | None
    """`reward`, `metrics` and `status`, once it is finished."""


class _SessionFork(TypedDict):
    """A turn whose prompt does not begin with all ids of the one before."""

    turn: int
    reason: str


class SessionView(SessionSummary):
    """A session with numbers."""

    num_turns: int
    num_sampled_tokens: int
    num_conversations: int
    """Conversations that begin afresh, such as those of sub-agents."""
    counters: dict[str, int]
    forks: list[_SessionFork]
    in_flight: int
    """Turns that are being sampled."""


class SessionTree(TypedDict):
    """All that a session has recorded, as docs/gateway.md describes it."""

    session_id: str
    messages: list[dict[str, Any]]
    tools: dict[str, list[dict[str, Any]]]
    turns: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    """Of the token tree, with ids and logprobs as arrays."""


class SessionCalls:
    """Creates sessions for agents, and reads what they recorded. `AsyncClient.sessions` is one.

    All methods raise as the client's others do; `UnknownSessionError` if there is no such session. An error in what is
    sent names the field, its rule and the value.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def create(self, settings: Mapping[str, Any] | None = None) -> CreatedSession:
        """Create a session.

        `settings` may have `metadata`, `policy`, `follow`, `sampling`, `limits`, `template_options`, `on_disconnect`
        and `ttl_s`.
        """
        answer: CreatedSession = await self._calls.post("/v1/sessions", settings or {})
        return answer

    async def get(self, session_id: str) -> SessionView:
        """Status, settings, outcome, counters and forks."""
        answer: SessionView = await self._calls.get(_path(session_id))
        return answer

    async def samples(self, session_id: str, *, advantage: float | None = None) -> list[TrainingSample]:
        """The rows to train on, one for each branch, with their images; each sampled id is trained once.

        `advantage` is that of all trained ids: by default the session's reward, or 0 without one.
        """
        wanted = "" if advantage is None else f"?advantage={float(advantage)!r}"
        answer = await self._calls.get_compact(f"{_path(session_id)}/samples{wanted}")
        digests = {image["sha256"] for row in answer["samples"] for image in row["images"]}
        files = await asyncio.gather(*(self.image(session_id, digest) for digest in digests))
        images = {digest: EncodedImage(data) for digest, data in zip(digests, files, strict=True)}
        return [_read_sample(row, images) for row in answer["samples"]]

    async def tree(self, session_id: str) -> SessionTree:
        """All that is recorded: messages, tools, turns, and the nodes of the token tree with arrays."""
        answer: SessionTree = await self._calls.get_compact(f"{_path(session_id)}/tree")
        return answer

    async def image(self, session_id: str, sha256: str) -> bytes:
        """The file of an image in the session."""
        return await self._calls.get_bytes(f"{_path(session_id)}/images/{quote(sha256, safe='')}")

    async def finish(self, session_id: str, outcome: Mapping[str, Any] | None = None) -> SessionSummary:
        """End a session with its `reward`, `metrics` and `status`; returns the session.

        Raises:
            SessionEndedError: it has ended already, in another way.
        """
        answer: SessionSummary = await self._calls.post(f"{_path(session_id)}/finish", outcome or {})
        return answer

    async def delete(self, session_id: str) -> None:
        """Delete a session and all that it recorded."""
        await self._calls.delete(_path(session_id))

    async def list(self, *, status: SessionStatus | None = None) -> list[SessionSummary]:
        """All sessions, oldest first, or those of one status."""
        found: list[SessionSummary] = []
        wanted = "" if status is None else f"&status={quote(status)}"
        while True:
            after = f"&after={found[-1]['session_id']}" if found else ""
            page = await self._calls.get(f"/v1/sessions?limit={_PAGE}{wanted}{after}")
            found += page["sessions"]
            if not page["has_more"]:
                return found


def _path(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


def _read_sample(row: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> TrainingSample:
    spans = [
        ImageSpan(**{name: value for name, value in span.items() if name != "sha256"}, image=images[span["sha256"]])
        for span in row["images"]
    ]
    controls = tuple(map(ControlSpan.from_json, row.get("controls", ())))
    kept = read_kept_ids(row.get("kept_ids"))
    return TrainingSample(**{**row, "images": tuple(spans), "kept_ids": kept, "controls": controls})
