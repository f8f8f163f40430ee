"""The control API of a gateway's sessions (docs/gateway.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.client.calls import Calls


class SessionCalls:
    """Creates sessions for agents, and reads what they recorded. `AsyncClient.sessions` is one.

    All methods raise as the client's others do; `UnknownSessionError` if there is no such session.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def create(self, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Create a session: `session_id`, `api_key` (told only here), `openai_base_url`, `anthropic_base_url`.

        `settings` may have `metadata`, `sampling`, `limits`, `template_options`, `on_disconnect` and `ttl_s`.
        """
        answer: dict[str, Any] = await self._calls.post("/v1/sessions", settings or {})
        return answer

    async def get(self, session_id: str) -> dict[str, Any]:
        """Status, settings, outcome, counters and forks."""
        answer: dict[str, Any] = await self._calls.get(f"/v1/sessions/{session_id}")
        return answer

    async def tree(self, session_id: str) -> dict[str, Any]:
        """All that is recorded: messages, tools, turns, and the nodes of the token tree with arrays."""
        answer: dict[str, Any] = await self._calls.get_compact(f"/v1/sessions/{session_id}/tree")
        return answer

    async def image(self, session_id: str, sha256: str) -> bytes:
        """The file of an image in the session."""
        return await self._calls.get_bytes(f"/v1/sessions/{session_id}/images/{sha256}")

    async def finish(self, session_id: str, outcome: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End a session with its `reward`, `metrics` and `status`; returns the session.

        Raises:
            SessionEndedError: it has ended already, in another way.
        """
        answer: dict[str, Any] = await self._calls.post(f"/v1/sessions/{session_id}/finish", outcome or {})
        return answer

    async def delete(self, session_id: str) -> None:
        """Delete a session and all that it recorded."""
        await self._calls.delete(f"/v1/sessions/{session_id}")
