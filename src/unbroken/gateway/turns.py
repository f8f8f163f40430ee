"""Answers the dialects' questions from sessions; without a session, as the plain server does."""

from __future__ import annotations

from starlette.requests import Request

from unbroken.gateway.gate import SESSION, add_end
from unbroken.gateway.sessions import Sessions
from unbroken.server.context import ServerContext
from unbroken.server.questions import PlainTurns
from unbroken.server.turns import OpenTurn, Question


class SessionTurns:
    """Opens turns of sessions. See `TurnOpener`."""

    def __init__(self, context: ServerContext, sessions: Sessions) -> None:
        self._context = context
        self.sessions = sessions
        self._plain = PlainTurns(context)

    async def open(self, request: Request, question: Question, *, id_prefix: str) -> OpenTurn:
        """See `TurnOpener`."""
        session_id = request.scope.get(SESSION)
        if session_id is None:
            return await self._plain.open(request, question, id_prefix=id_prefix)
        session = await self.sessions.get_live(session_id)
        turn, leave = await session.open(self._context, question, id_prefix=id_prefix)
        add_end(request.scope, leave)
        return turn

    async def close(self) -> None:
        """See `TurnOpener`."""
        await self.sessions.close()
