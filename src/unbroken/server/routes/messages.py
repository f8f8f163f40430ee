"""Anthropic's Messages, and the count of a prompt's ids.

Errors are in Anthropic's form (`http/errors.py`).
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request, Response

from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.errors import error_object
from unbroken.server.http.event_stream import open_named_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.plain_turns import render_question
from unbroken.server.questions import make_question
from unbroken.server.turns import Question, open_reply, stream_events
from unbroken.server.wire.anthropic.answer import MessageStream, MessageWriter, ShownThinking
from unbroken.server.wire.anthropic.body import ConversationBody, MessagesBody
from unbroken.server.wire.anthropic.conversation import read_conversation

router = Routes(Access.CLIENT)


@router.post(
    "/v1/messages",
    summary="Anthropic's Messages",
    response_description="a message with `content` blocks, `stop_reason`, `usage`, `policy_versions`; or events",
)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Render the messages and answer."""
    context = get_context(request)
    asked = await _read_question(context, request, body)
    question = replace(asked, sampling=body.sampling, max_tokens=body.max_tokens, caps_max_tokens=True)
    turn = await context.turns.open(request, question, id_prefix="msg_")
    writer = MessageWriter(
        answer_id=turn.answer_id,
        model_name=body.model or context.config.model_name,
        prompt_length=len(turn.request.prompt_ids),
        shown=_choose_shown(body),
        max_tokens=body.max_tokens,
        context_length=context.service.engine.context_length,
    )
    if body.stream:
        path = request.url.path
        stream = MessageStream(writer, open_reply(turn, question, context.metrics.events))
        return await open_named_event_stream(
            stream_events(turn, stream), format_error=lambda error: error_object(error, path=path)
        )
    (sequence,) = (await turn.sample()).sequences
    return json_response(writer.format_message(await context.read_reply(turn, question, sequence), sequence))


@router.post(
    "/v1/messages/count_tokens",
    summary="Number of ids of Anthropic's messages",
    response_description="`input_tokens`",
)
async def count_tokens(body: ConversationBody, request: Request) -> Response:
    """Render the messages and count the ids of the prompt."""
    context = get_context(request)
    _, prompt = await render_question(context, await _read_question(context, request, body))
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _read_question(context: ServerContext, request: Request, body: ConversationBody) -> Question:
    note_ignored(request, body.check_supported())
    return await make_question(context, request, body, read_conversation(body), format_name="output_config.format")


def _choose_shown(body: ConversationBody) -> ShownThinking:
    if body.thinking is None:
        return ShownThinking.WHOLE
    if body.thinking.type == "disabled":
        return ShownThinking.NONE
    return ShownThinking.OMITTED if body.thinking.display == "omitted" else ShownThinking.WHOLE
