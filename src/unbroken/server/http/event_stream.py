"""Streamed answers: server-sent events as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unbroken.server.http.errors import HttpError, error_object, to_http_error
from unbroken.server.http.json import encode_json


async def open_event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """Answer with one event for each chunk and `[DONE]` at the end, as OpenAI's completions.

    The answer begins with the first chunk, so that an error in the request gets its own status. A later error is an
    event with the error object, without `[DONE]`.
    """
    return _EventStream(await _begin(chunks), chunks, format_error=error_object, is_named=False)


async def open_named_event_stream(
    chunks: AsyncGenerator[dict[str, Any]], *, format_error: Callable[[HttpError], dict[str, Any]]
) -> Response:
    """Answer with one event for each chunk, named by its `type`; the last chunk says that it is the last.

    Errors are as in `open_event_stream`, but a later one is the event that `format_error` makes of it.
    """
    return _EventStream(await _begin(chunks), chunks, format_error=format_error, is_named=True)


async def _begin(chunks: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return await anext(chunks, None)
    except BaseException:
        await chunks.aclose()
        raise


class _EventStream(Response):
    """Sends from the request's own task. Starlette's response starts another one, which the time-out misses."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: dict[str, Any] | None,
        chunks: AsyncGenerator[dict[str, Any]],
        *,
        format_error: Callable[[HttpError], dict[str, Any]],
        is_named: bool,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._format_error = format_error
        self._is_named = is_named

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
                yield self._encode(self._first)
            async for chunk in self._chunks:
                yield self._encode(chunk)
        except Exception as error:
            yield self._encode(self._format_error(to_http_error(error)))
            return
        if not self._is_named:
            yield b"data: [DONE]\n\n"

    def _encode(self, chunk: dict[str, Any]) -> bytes:
        name = f"event: {chunk['type']}\n".encode() if self._is_named else b""
        return name + b"data: " + encode_json(chunk) + b"\n\n"
