"""OpenAI's Responses. No answer is kept: the input is the whole conversation."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request, Response

from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.event_stream import open_named_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.questions import make_question
from unbroken.server.turns import Question, open_reply, stream_events
from unbroken.server.wire.responses.answer import ResponseStream, ResponseWriter
from unbroken.server.wire.responses.body import ResponsesBody
from unbroken.server.wire.responses.conversation import read_conversation

router = Routes(Access.CLIENT)


@router.post(
    "/v1/responses",
    summary="OpenAI's Responses",
    response_description="a response with `output` items, `status`, `usage`, `policy_versions`; or events",
)
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Render the input and answer."""
    context = get_context(request)
    asked = await _read_question(context, request, body)
    question = replace(asked, sampling=body.sampling, max_tokens=body.max_output_tokens, caps_max_tokens=True)
    turn = await context.turns.open(request, question, id_prefix="resp_")
    writer = ResponseWriter(
        answer_id=turn.answer_id, model_name=body.model or context.config.model_name, body=body, request=turn.request
    )
    if body.stream:
        stream = ResponseStream(writer, open_reply(turn, question, context.metrics.events))
        return await open_named_event_stream(stream_events(turn, stream), format_error=stream.format_failure)
    (sequence,) = (await turn.sample()).sequences
    return json_response(writer.format_whole(await context.read_reply(turn, question, sequence), sequence))


async def _read_question(context: ServerContext, request: Request, body: ResponsesBody) -> Question:
    note_ignored(request, body.check_supported())
    return await make_question(context, request, body, read_conversation(body), format_name="text.format")
