"""OpenAI's chat completions, and prime-rl's `/v1/chat/completions/tokens`, which continues given ids.

Our renderer renders messages and parses completions. With `tokens`, these ids are the prompt, and the messages are not
rendered, so the template may even refuse them. A whole choice is its stream, joined. OpenAI has no form for a call that
cannot be parsed: it is content, and listed in `malformed_tool_calls`.
"""

from __future__ import annotations

import time
from asyncio import wrap_future
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from pydantic import ConfigDict, Field

from unbroken.images.loader import find_image_parts
from unbroken.messages import ToolCall, get_image_source, make_call
from unbroken.rendering.base import PartKind
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.server.context import ServerContext, get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.bodies import BodyModel, Ids, Objects
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.event_stream import Events, open_event_stream
from unbroken.server.http.json import json_response, note_ignored
from unbroken.server.questions import continue_prompt, render_question
from unbroken.server.turns import (
    OpenTurn,
    Question,
    ThinkingBudget,
    get_session_id,
    open_reply,
    read_retry_hint,
    stream_events,
)
from unbroken.server.wire.conversation import Tools, fill_arguments, get_name, require_tool
from unbroken.server.wire.fields import CHAT, find_unknown_keys, list_asked
from unbroken.server.wire.images import format_features
from unbroken.server.wire.openai import (
    OpenAIFields,
    count_usage,
    format_chat_logprobs,
    format_finish_reason,
    format_usage,
    format_weight_versions,
    list_version_spans,
)
from unbroken.server.wire.reply import ReplyCall, ReplyReader
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleResult, token_ids

_TEXT_KEYS = {PartKind.REASONING: ("reasoning_content", "reasoning"), PartKind.CONTENT: ("content",)}
"""Clients read reasoning under either name: vLLM had the first one before 0.32, and has the second."""
_ID_PREFIX = "chatcmpl-"
router = Routes(Access.CLIENT)


class _ReasoningBudget(BodyModel):
    """How much to reason."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(default=None, ge=1)


class ChatBody(OpenAIFields):
    """A conversation to answer."""

    messages: Objects
    tools: Tools | None = None
    """Functions as JSON schemas."""
    tool_choice: Any = None
    """"auto"; "none" to read no calls (the tools are rendered all the same); "required", or a function to call, as
    `{"type": "function", "function": {"name": ...}}`."""
    parallel_tool_calls: bool | None = None
    """False for exactly one call where calls are required; refused where the model decides whether it calls."""
    max_completion_tokens: int | None = None
    """Used instead of `max_tokens`. Without both, all that fits."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    """How many of the most likely ids to report at each position."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""
    thinking_token_budget: int | None = Field(default=None, ge=1)
    """From vLLM: the reasoning is closed after so many ids of the reply, by given ids. Not with `logprobs`."""
    reasoning: _ReasoningBudget | None = None
    """As OpenRouter has it: its `max_tokens` is a `thinking_token_budget`, but ignored where none can be kept."""

    def check_supported(self) -> list[str]:
        """The names of fields that are ignored. Raises `HttpError` for what this server does not support."""
        ignored = CHAT.check(self.model_extra) + self.list_ignored_options()
        functions = self.choose_functions()
        if functions and self.structured_output is not None:
            raise HttpError(400, "response_format must be left out where calls are required", param="response_format")
        if self.parallel_tool_calls is False and self.reads_calls and not functions:
            raise HttpError(
                400,
                "parallel_tool_calls must be left out or true with tool_choice 'auto', where the model decides how "
                "many tools it calls: require a call ('required', or a function) for exactly one",
                param="parallel_tool_calls",
            )
        if self.top_logprobs and not self.logprobs:
            raise HttpError(
                400, f"top_logprobs needs logprobs true, got {self.top_logprobs} without it", param="top_logprobs"
            )
        return ignored

    def make_budget(self, request: Request) -> ThinkingBudget | None:
        """How much the reply may reason; other wishes for it are named as ignored."""
        if self.reasoning is not None:
            note_ignored(request, list_asked(self.reasoning.model_extra, "reasoning"))
        if self.thinking_token_budget is not None and self.logprobs:
            raise HttpError(
                400,
                f"thinking_token_budget must be left out with logprobs, got {self.thinking_token_budget}: the ids that "
                "close the reasoning are given, and have none",
                param="thinking_token_budget",
            )
        if self.thinking_token_budget is not None:
            if self.reasoning is not None and self.reasoning.max_tokens is not None:
                note_ignored(request, ["reasoning.max_tokens"])
            return ThinkingBudget(field="thinking_token_budget", num_ids=self.thinking_token_budget)
        if self.reasoning is None or self.reasoning.max_tokens is None:
            return None
        name, note = "reasoning.max_tokens", partial(note_ignored, request)
        if self.logprobs:
            note([name])
            return None
        return ThinkingBudget(field=name, num_ids=self.reasoning.max_tokens, note_ignored=note)

    @property
    def reads_calls(self) -> bool:
        """Whether the reply can have calls: tools were offered, and may be called."""
        return bool(self.tools) and self.tool_choice != "none"

    def choose_functions(self) -> tuple[Any, ...]:
        """The tools of which one must be called; none if the reply is free. Raises `HttpError` for another choice."""
        match self.tool_choice:
            case None | "auto" | "none":
                return ()
            case "required":
                name = None
            case {"type": "function", "function": {"name": str(name)}}:
                pass
            case _:
                raise HttpError(
                    400,
                    "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
                    f", got {shorten(self.tool_choice)}",
                    param="tool_choice",
                )
        tools: Sequence[Any] = self.tools or ()
        chosen = tuple(require_tool(tools, name=name, choice=self.tool_choice))
        if not all(isinstance(get_name(tool), str) for tool in chosen):
            raise HttpError(400, "tools must be functions with names where calls are required", param="tools")
        return chosen

    @property
    def may_call_several(self) -> bool:
        """Whether required calls may be more than one."""
        return self.tool_choice == "required" and self.parallel_tool_calls is not False


class ChatTokensBody(ChatBody):
    """A `ChatBody` with the prompt's ids."""

    tokens: Ids
    """The prompt; `messages` are not rendered."""


@router.post(
    "/v1/chat/completions",
    summary="OpenAI's chat completions",
    response_description="`choices` with `message`, `logprobs`, `finish_reason`, `policy_versions`; or events",
)
async def _chat_completions(body: ChatBody, request: Request) -> Response:
    """Render the messages and answer."""
    context = get_context(request)
    question = await _read_question(context, request, body)
    turn = await context.turns.open(request, question, id_prefix=_ID_PREFIX)
    if body.stream:
        return await _stream_answer(context, body, question, turn)
    return await _write_answer(context, body, question, turn, await turn.sample())


@router.post(
    "/v1/chat/completions/render",
    summary="Messages to ids and images (vLLM)",
    response_description="`token_ids`, expanded, and the `features` that `/inference/v1/generate` takes",
)
async def _render_chat(body: ChatBody, request: Request) -> Response:
    """Render the messages without sampling. `features` name images by hash, under which the server keeps them.

    What would be refused for sampling is refused here: the ids are rendered for a call with these fields.
    """
    context = get_context(request)
    question = await _read_question(context, request, body)
    most = 1 if question.max_tokens is None else question.max_tokens
    params = body.to_params(
        end_ids=(),
        max_tokens=most,
        num_top_logprobs=question.num_top_logprobs,
        structured_output=question.structured_output,
    )
    renderer, prompt = await render_question(context, question)
    await wrap_future(context.text_threads.submit(question.bound_thinking, renderer, params))
    return json_response(
        {"model": context.config.model_name, "token_ids": prompt.token_ids, "features": format_features(prompt.images)}
    )


@router.post(
    "/v1/chat/completions/tokens",
    summary="Chat completions over given ids",
    response_description="as for /v1/chat/completions",
)
async def _chat_completions_tokens(body: ChatTokensBody, request: Request) -> Response:
    """Continue exactly `tokens`. The images in the messages belong to the placeholders in `tokens`, in order."""
    context = get_context(request)
    question = await _read_question(context, request, body)
    images = [get_image_source(part) for _, part in find_image_parts(question.messages)]
    tokens = token_ids(body.tokens, name="tokens")
    (prompt,) = await context.images.place(
        [tokens], [images], question.image_settings, names=lambda _: "images of messages"
    )
    renderer = await wrap_future(context.text_threads.submit(context.get_renderer, question.template_options))
    turn = await continue_prompt(context, question, renderer, prompt, id_prefix=_ID_PREFIX)
    if body.stream:
        return await _stream_answer(context, body, question, turn)
    return await _write_answer(context, body, question, turn, await turn.sample())


async def _read_question(context: ServerContext, request: Request, body: ChatBody) -> Question:
    policy = await context.policies.find(request, body.model)
    ignored, unknown = body.check_supported(), find_unknown_keys(body.messages)
    if unknown:  # a template may read any key of a message
        ignored += await wrap_future(
            context.text_threads.submit(
                lambda: [name for name in unknown if not context.reads_key(name.rpartition(".")[2])]
            )
        )
    note_ignored(request, ignored)
    settings = context.images.encode_settings(body.mm_processor_kwargs)
    loaded: Any = await context.images.load_messages(fill_arguments(body.messages), settings)
    tools: Any = body.tools or ()
    options = body.chat_template_kwargs or {}
    note_ignored(request, await context.find_ineffective(tools, options))
    messages = await context.adapt_roles(loaded, options)
    return Question(
        messages=messages,
        tools=tools,
        reads_calls=body.reads_calls,
        required_functions=body.choose_functions(),
        may_call_several=body.may_call_several,
        template_options=options,
        image_settings=settings,
        sampling=body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        structured_output=body.structured_output,
        thinking=body.make_budget(request),
        n=body.num_choices,
        policy=policy,
        session_id=get_session_id(request, body.session_id),
        retry=await read_retry_hint(request),
    )


def _make_writer(context: ServerContext, body: ChatBody, turn: OpenTurn) -> _ChoiceWriter:
    model_name = body.model or context.config.model_name
    return _ChoiceWriter(codec=context.codec, model_name=model_name, body=body, answer_id=turn.answer_id)


async def _stream_answer(context: ServerContext, body: ChatBody, question: Question, turn: OpenTurn) -> Response:
    writer = _make_writer(context, body, turn)
    readers = [
        open_reply(turn, question, context.codec, context.metrics.events, index=k) for k in range(turn.request.n)
    ]
    streams = [_ChoiceStream(writer, k, reader) for k, reader in enumerate(readers)]
    return await open_event_stream(_stream(body, turn, writer, streams))


async def _write_answer(
    context: ServerContext, body: ChatBody, question: Question, turn: OpenTurn, result: SampleResult
) -> Response:
    writer = _make_writer(context, body, turn)
    replies = [await context.read_reply(turn, question, one, index=k) for k, one in enumerate(result.sequences)]

    def format_choices() -> list[dict[str, Any]]:
        read = enumerate(zip(result.sequences, replies, strict=True))
        return [writer.format_choice(k, sequence, reply.reader) for k, (sequence, reply) in read]

    choices = await wrap_future(context.text_threads.submit(format_choices)) if body.logprobs else format_choices()
    answer = {**writer.format_head("chat.completion"), "choices": choices, "usage": count_usage([result])}
    if body.return_token_ids:
        answer["prompt_token_ids"] = result.prompt_ids
    if result.image_sha256s:
        answer["image_sha256s"] = result.image_sha256s
    return json_response(answer)


async def _stream(
    body: ChatBody, turn: OpenTurn, writer: _ChoiceWriter, streams: Sequence[_ChoiceStream]
) -> AsyncGenerator[Events]:
    """Yield one event per chunk; text that is not certain yet comes with a later event."""
    head = writer.format_head("chat.completion.chunk")
    prompt: dict[str, Any] = {"prompt_token_ids": turn.request.prompt_ids} if body.return_token_ids else {}
    async with aclosing(stream_events(turn, streams)) as parts:
        async for choices in parts:
            yield [{**head, **(prompt if k == 0 else {}), "choices": [choice]} for k, choice in enumerate(choices)]
            prompt = {}
    if body.includes_usage:
        num_sampled = sum(stream.num_sampled for stream in streams)
        yield [{**head, "choices": [], "usage": format_usage(len(turn.request.prompt_ids), num_sampled)}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoiceWriter:
    """Formats the choices of one answer."""

    codec: TextCodec
    model_name: str
    body: ChatBody
    answer_id: str

    def format_head(self, kind: str) -> dict[str, Any]:
        """The fields before the choices; `kind` is the name of the object."""
        return {"id": self.answer_id, "object": kind, "created": int(time.time()), "model": self.model_name}

    def format_choice(self, index: int, sequence: SampledSequence, reply: ReplyReader) -> dict[str, Any]:
        """Format a whole choice, whose reply is closed. With logprobs, call this in a text thread."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
        if reply.reasoning:
            message |= dict.fromkeys(_TEXT_KEYS[PartKind.REASONING], reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [_format_call(call) for call in reply.calls]
        return {
            "index": index,
            "message": message,
            "finish_reason": _format_finish_reason(sequence.finish_reason, has_calls=bool(reply.calls)),
            **self.format_ids(sequence),
            **self.format_versions(sequence),
            **_format_malformed(reply),
        }

    def format_ids(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
        """Format ids and logprobs, where the request wants them."""
        body = self.body
        fields: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            fields["logprobs"] = format_chat_logprobs(self.codec, sampled, as_ids=bool(body.return_tokens_as_token_ids))
        if body.return_token_ids:
            fields["token_ids"] = sampled.completion_ids
        return fields

    def format_versions(self, sampled: SampledSequence | SampleChunk) -> dict[str, Any]:
        """Format the policy versions of a choice, at its end."""
        fields: dict[str, Any] = {"policy_versions": list_version_spans(sampled)}
        if self.body.return_weight_versions:
            fields["weight_versions"] = format_weight_versions(sampled)
        return fields


class _ChoiceStream:
    """Formats one streamed choice."""

    def __init__(self, writer: _ChoiceWriter, index: int, reply: ReplyReader) -> None:
        self._writer = writer
        self._index = index
        self.reply = reply
        self._is_first = True
        self.num_sampled = 0

    def format_events(self, chunk: SampleChunk) -> Iterator[dict[str, Any]]:
        """Format the choice of one event. Text that is not certain yet comes with a later one."""
        self.num_sampled += len(chunk.completion_ids)
        num_calls = len(self.reply.calls)
        pieces = self.reply.read(chunk)
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if self._is_first else {}
        self._is_first = False
        for kind, keys in _TEXT_KEYS.items():
            if text := "".join(piece.text for piece in pieces if piece.kind is kind):
                delta |= dict.fromkeys(keys, text)
        if calls := self.reply.calls[num_calls:]:
            delta["tool_calls"] = [{"index": k, **_format_call(call)} for k, call in enumerate(calls, num_calls)]
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "finish_reason": None,
            **self._writer.format_ids(chunk),
        }
        if chunk.finish_reason is not None:
            choice["finish_reason"] = _format_finish_reason(chunk.finish_reason, has_calls=bool(self.reply.calls))
            choice |= self._writer.format_versions(chunk) | _format_malformed(self.reply)
        yield choice


def _format_call(call: ReplyCall) -> ToolCall:
    return make_call(call.call_id, call.name, call.arguments)


def _format_malformed(reply: ReplyReader) -> dict[str, Any]:
    malformed = reply.list_malformed()
    return {"malformed_tool_calls": malformed} if malformed else {}


def _format_finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else format_finish_reason(reason)
