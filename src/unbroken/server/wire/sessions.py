"""The name of the conversation that a request belongs to, as vLLM's clients give it."""

from __future__ import annotations

from starlette.requests import Request

SESSION_HEADER = "X-Session-ID"


def get_session_id(request: Request, given: str | None) -> str | None:
    """The body's `session_id`, else the header's; None without a name."""
    return given or request.headers.get(SESSION_HEADER) or None
