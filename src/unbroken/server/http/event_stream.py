"""Streamed answers: server-sent events as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unbroken.server.http.errors import error_object, to_http_error
from unbroken.server.http.json import encode_json


async def open_event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """Answer with one event for each chunk and `[DONE]` at the end.

    The answer begins with the first chunk, so that an error in the request gets its own status. A later error is an
    event with the error object, without `[DONE]`.
    """
    try:
        first = await anext(chunks, None)
    except BaseException:
        await chunks.aclose()
        raise
    return _EventStream(first, chunks)


class _EventStream(Response):
    """Sends from the request's own task. Starlette's response starts another one, which the time-out misses."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any] | None, chunks: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._events()) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes]:
        try:
            if self._first is not None:
                yield _event(self._first)
            async for chunk in self._chunks:
                yield _event(chunk)
        except Exception as error:
            yield _event(error_object(to_http_error(error)))
            return
        yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(chunk) + b"\n\n"
