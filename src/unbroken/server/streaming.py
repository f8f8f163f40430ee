"""Server-sent events: answers in pieces, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse

from unbroken.server.json_response import json_bytes
from unbroken.server.problems import error_object, problem_of


async def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """An answer with one event for each chunk and `[DONE]` at the end.

    The first chunk is awaited here: what is wrong with a request is then an error with its own status. What goes wrong
    later is an event with the error object, after which the stream ends without `[DONE]`.
    """
    first = await anext(chunks, None)
    return StreamingResponse(
        _events(first, chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _events(first: dict[str, Any] | None, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(chunks):
            if first is not None:
                yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
    except Exception as error:
        yield _event(error_object(problem_of(error)))
        return
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(chunk) + b"\n\n"
