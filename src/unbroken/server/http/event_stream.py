"""Streamed answers: server-sent events as the clients of OpenAI, Anthropic and Google read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unbroken.server.http.errors import HttpError, error_object, to_http_error
from unbroken.server.http.json import encode_json

Events: TypeAlias = Sequence[dict[str, Any]]
"""Events that are ready at the same time: they are sent at once."""


async def open_event_stream(
    chunks: AsyncGenerator[Events],
    *,
    format_error: Callable[[HttpError], dict[str, Any]] = error_object,
    is_named: bool = False,
    end: bytes = b"data: [DONE]\n\n",
) -> Response:
    """Answer with one event for each chunk and `end` behind the last; by default as OpenAI's completions.

    The answer begins with the first chunk, so that an error in the request gets its own status. A later error is the
    event that `format_error` makes of it, without `end`. With `is_named` each event is named by its `type`.
    """
    return _EventStream(await _begin(chunks), chunks, format_error=format_error, is_named=is_named, end=end)


async def _begin(chunks: AsyncGenerator[Events]) -> Events | None:
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
        first: Events | None,
        chunks: AsyncGenerator[Events],
        *,
        format_error: Callable[[HttpError], dict[str, Any]],
        is_named: bool,
        end: bytes,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._format_error = format_error
        self._is_named = is_named
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._bodies()) as bodies:
                async for body, is_last in bodies:
                    await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _bodies(self) -> AsyncGenerator[tuple[bytes, bool]]:
        """The parts of the answer, and whether each is the last."""
        try:
            events = self._first
            while events is not None:
                yield b"".join(map(self._encode, events)), False
                events = await anext(self._chunks, None)
        except Exception as error:
            yield self._encode(self._format_error(to_http_error(error))), True
        else:
            yield self._end, True

    def _encode(self, event: dict[str, Any]) -> bytes:
        name = f"event: {event['type']}\n".encode() if self._is_named else b""
        return name + b"data: " + encode_json(event) + b"\n\n"
