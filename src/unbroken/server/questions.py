"""From bodies to questions, and from questions to turns that are rendered afresh: no sessions."""

from __future__ import annotations

from asyncio import wrap_future
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from starlette.requests import Request

from unbroken.counters import Event
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import ConstrainsCalls, Renderer, ToolCallStatus
from unbroken.rollout.thinking import ThinkingBound
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.server.http.json import note_ignored
from unbroken.server.images import RequestPrompt
from unbroken.server.texts import check_conversation
from unbroken.server.turns import OpenTurn, Question, ThinkingBudget, get_session_id, read_retry_hint
from unbroken.server.wire.conversation import ConversationBuilder, ToolChoice, get_name
from unbroken.server.wire.reply import ReplyReader, WholeReply
from unbroken.types import (
    FinishReason,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    StructuredOutput,
    TokenIds,
)


class _ConversationFields(Protocol):
    """What the bodies of these dialects have in common. Each names its own fields in errors."""

    model: str | None
    chat_template_kwargs: dict[str, Any] | None
    mm_processor_kwargs: dict[str, Any] | None

    def make_tools(self) -> list[ToolSchema]:
        """The tools in the OpenAI form of chat completions."""
        ...

    def choose_tools(self, tools: list[ToolSchema]) -> ToolChoice:
        """What the reply may call. Raises `HttpError` for a choice that cannot be made."""
        ...

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint of the dialect's own field."""
        ...

    @property
    def effort(self) -> str | None:
        """The wish how much to reason; "none" for not at all."""
        ...

    @property
    def effort_field(self) -> str:
        """The field that `effort` is from, for the header of ignored ones."""
        ...

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The field that bounds the reasoning, with its number of ids."""
        ...


async def make_question(
    context: ServerContext,
    request: Request,
    body: _ConversationFields,
    conversation: ConversationBuilder,
    *,
    format_name: str,
) -> Question:
    """Make the question of a body, whose conversation was translated; its images are loaded.

    `format_name` is the field of `structured_output`, for errors. Sampling is left as it is by default.

    Raises:
        HttpError: the model, an option or a choice is not one that this server has.
        UnbrokenError: an image cannot be used, or a key is not supported.
    """
    policy = await context.policies.find(request, body.model)
    settings = context.images.encode_settings(body.mm_processor_kwargs)
    loaded: Any = await context.images.load_messages(conversation.messages, settings, places=conversation.image_places)
    tools, structured_output = body.make_tools(), body.structured_output
    choice = body.choose_tools(tools)
    if choice.required_functions and structured_output is not None:
        raise HttpError(400, f"{format_name} must be left out where calls are required", param=format_name)
    effort = body.effort
    options: Mapping[str, Any] = body.chat_template_kwargs or {}
    if effort is not None:
        chosen = await wrap_future(
            context.text_threads.submit(_choose_reasoning_options, effort, reads_option=context.reads_option)
        )
        if not chosen:
            note_ignored(request, [body.effort_field])
        options = {**chosen, **options}
    note_ignored(request, await context.find_ineffective(tools, body.chat_template_kwargs or {}))
    messages = await context.adapt_roles(loaded, options)
    return Question(
        messages=messages,
        tools=tools,
        reads_calls=choice.reads_calls,
        required_functions=choice.required_functions,
        may_call_several=choice.may_call_several,
        template_options=options,
        image_settings=settings,
        structured_output=structured_output,
        thinking=_read_thinking_budget(body, request),
        policy=policy,
        session_id=get_session_id(request, None),
        retry=await read_retry_hint(request),
    )


def _read_thinking_budget(body: _ConversationFields, request: Request) -> ThinkingBudget | None:
    """The budget of a body; it is ignored where it cannot be kept, as other fields."""
    if (budget := body.thinking_budget) is None:
        return None
    name, num_ids = budget
    return ThinkingBudget(field=name, num_ids=num_ids, note_ignored=partial(note_ignored, request))


def _choose_reasoning_options(effort: str | None, *, reads_option: Callable[[str], bool]) -> dict[str, Any]:
    """The template options for an effort; none for an option that the template does not read.

    "none" is `enable_thinking: false`, and any other effort is `reasoning_effort`. Without an effort, and for a
    template that knows neither, the model reasons as it does.
    """
    if effort is None:
        return {}
    name, value = ("enable_thinking", False) if effort == "none" else ("reasoning_effort", effort)
    return {name: value} if reads_option(name) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTurn:
    """A turn that goes to the engine as it is. See `OpenTurn`."""

    service: TurnService
    answer_id: str
    renderer: Renderer
    request: SampleRequest
    is_recorded: bool = False
    replies: Mapping[int, WholeReply] = field(default_factory=dict)

    async def sample(self) -> SampleResult:
        """Sample the whole reply."""
        (result,) = await self.service.sample([self.request])
        return result

    async def stream(self) -> AsyncGenerator[SampleChunk]:
        """Yield the reply as it is sampled."""
        async with aclosing(self.service.stream([self.request])) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def keep_streamed(self, index: int, reply: ReplyReader) -> None:
        """Nothing is recorded."""


class PlainTurns:
    """Opens turns that are rendered afresh. See `TurnOpener`."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def open(self, request: Request, question: Question, *, id_prefix: str) -> OpenTurn:
        """Open the turn that answers a question; nothing is sampled yet."""
        renderer, prompt = await render_question(self._context, question)
        return await continue_prompt(self._context, question, renderer, prompt, id_prefix=id_prefix)

    async def recall(self, request: Request, answer_id: str) -> Sequence[Message] | None:
        """Nothing is recorded."""
        return None

    async def open_conversation(self, request: Request, name: str, items: Sequence[Mapping[str, Any]]) -> bool:
        """Nothing is recorded."""
        return False

    async def recall_conversation(self, request: Request, name: str) -> Mapping[str, Any] | None:
        """Nothing is recorded."""
        return None

    async def close(self) -> None:
        """Nothing is kept."""


async def render_question(context: ServerContext, question: Question) -> tuple[Renderer, RequestPrompt]:
    """Render a question's messages and tools, in a text thread.

    Raises:
        HttpError: the conversation is longer than the context, or a template option is reserved.
        UnbrokenError: the messages or tools are invalid, or the template refuses them.
    """

    def render() -> tuple[Renderer, RequestPrompt]:
        check_conversation(context, question.messages, question.tools, question.template_options)
        renderer = context.get_renderer(question.template_options, question.image_settings)
        rendered = renderer.render(question.messages, tools=question.tools)
        return renderer, RequestPrompt(token_ids=rendered.token_ids, images=rendered.images)

    return await wrap_future(context.text_threads.submit(render))


async def continue_prompt(
    context: ServerContext, question: Question, renderer: Renderer, prompt: RequestPrompt, *, id_prefix: str
) -> PlainTurn:
    """Open the turn that continues this prompt.

    Raises:
        HttpError: a limit is exceeded.
        SamplingError: a sampling parameter is out of range.
        ContextOverflowError: prompt and `max_tokens` exceed the context.
    """
    sampling = question.sampling.to_params(
        end_ids=renderer.get_stop_token_ids(),
        max_tokens=question.choose_max_tokens(
            len(prompt.token_ids), context_length=context.service.engine.context_length
        ),
        num_top_logprobs=question.num_top_logprobs,
        structured_output=await _constrain_reply(context, question, renderer, prompt),
    )
    params = replace(sampling, return_kept_ids=question.returns_kept_ids, **question.controls)
    answer_id = f"{id_prefix}{uuid4().hex}"
    (request,) = context.service.make_requests(
        [prompt], params, n=question.n, policy=question.policy, session_id=question.session_id, name=answer_id
    )
    bound = await wrap_future(context.text_threads.submit(question.bound_thinking, renderer, params))
    service: TurnService = context.service if bound is None else _BoundedService(context, bound)
    if question.required_functions and sampling.structured_output is None:
        service = InsistingService(context, question, renderer)
    return PlainTurn(service=service, answer_id=answer_id, renderer=renderer, request=request)


class TurnService(Protocol):
    """What samples a turn: `SamplingService`, or one that insists on calls."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample the requests."""
        ...

    def stream(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, SampleChunk]]:
        """Yield chunks of the requests, with the index of their request."""
        ...


class InsistingService:
    """Samples one request until each reply has the calls that are required; a stream comes at its end, as one chunk.

    What is accepted is distributed as the policy's own replies with such calls, as under a grammar. Replies that were
    sampled before are counted and left out. After `MAX_TRIES` the last one is the answer as it is: an agent can say to
    the model what is missing, and an error would end it.
    """

    MAX_TRIES = 8

    def __init__(self, context: ServerContext, question: Question, renderer: Renderer) -> None:
        self._context = context
        self._question = question
        self._renderer = renderer
        self._names = {get_name(tool) for tool in question.required_functions}
        self.num_left_out = 0
        """Ids of the replies that were left out."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample the request."""
        (request,) = requests
        (result,) = await self._context.service.sample([request])
        sequences = [await self._insist(request, index, one) for index, one in enumerate(result.sequences)]
        return [replace(result, sequences=tuple(sequences))]

    async def stream(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, SampleChunk]]:
        """Sample the request, and yield each completion as one chunk."""
        (result,) = await self.sample(requests)
        for index, sequence in enumerate(result.sequences):
            yield 0, SampleChunk.from_sequence(index, sequence)

    async def _insist(self, request: SampleRequest, index: int, sequence: SampledSequence) -> SampledSequence:
        events, params = self._context.metrics.events, request.params
        # Without a choice, the same reply would come again; an abort is no reply.
        num_more = 0 if params.temperature == 0 or sequence.finish_reason is FinishReason.ABORT else self.MAX_TRIES - 1
        for number in range(1, num_more + 1):
            if await self._has_calls(request, sequence):
                return sequence
            events.count(Event.REQUIRED_CALL, "sampled_again")
            self.num_left_out += len(sequence.completion_ids)
            seed = None if params.seed is None else (params.seed + number * request.n + index) % 2**31
            again = replace(request, n=1, params=replace(params, seed=seed))
            ((sequence,),) = [result.sequences for result in await self._context.service.sample([again])]
        if not await self._has_calls(request, sequence):
            events.count(Event.REQUIRED_CALL, "missing")
        return sequence

    async def _has_calls(self, request: SampleRequest, sequence: SampledSequence) -> bool:
        parsed = await wrap_future(
            self._context.text_threads.submit(
                self._renderer.parse_response,
                sequence.completion_ids,
                prompt_ids=request.prompt_ids,
                tools=self._question.tools,
            )
        )
        names = [call.name for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
        is_number_right = len(names) >= 1 if self._question.may_call_several else len(names) == 1
        return is_number_right and self._names.issuperset(names)


@dataclass(slots=True, kw_only=True)
class _OpenPart:
    """The second part of a completion while it is streamed."""

    index: int
    first: SampledSequence
    given_ids: TokenIds
    request: SampleRequest
    chunks: list[SampleChunk] = field(default_factory=list)

    def add(self, chunk: SampleChunk) -> SampleChunk:
        """The next chunk as one of the completion; the last one has the facts of the whole."""
        chunk = replace(chunk, index=self.index)
        self.chunks.append(chunk)
        if chunk.finish_reason is None:
            return chunk
        whole = self.first.then(self.given_ids, SampleChunk.join(self.chunks, params=self.request.params))
        facts = {name: getattr(whole, name) for name in ("version_spans", "routed_experts", "queue_s")}
        return replace(chunk, **facts)


class _BoundedService:
    """Samples one request whose reasoning is bounded (`rollout.thinking`), so in one part or in two."""

    def __init__(self, context: ServerContext, bound: ThinkingBound) -> None:
        self._context = context
        self._bound = bound

    async def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample the request."""
        (request,) = requests
        (result,) = await self._context.service.sample([self._bound.limit(request)], may_go_on=True)
        rests = [await self._plan(request, first, index) for index, first in enumerate(result.sequences)]
        later = [rest[1] for rest in rests if rest is not None]
        answers = iter(await self._context.service.sample(later) if later else ())
        sequences = [
            first if rest is None else first.then(rest[0], next(answers).sequences[0])
            for first, rest in zip(result.sequences, rests, strict=True)
        ]
        return [replace(result, sequences=tuple(sequences))]

    async def stream(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, SampleChunk]]:
        """Sample the request, and yield the chunks of each completion's first part, then those of the others."""
        (request,) = requests
        parts: dict[int, list[SampleChunk]] = defaultdict(list)
        async with aclosing(self._context.service.stream([self._bound.limit(request)], may_go_on=True)) as chunks:
            async for _, chunk in chunks:
                parts[chunk.index].append(chunk)
                if chunk.finish_reason is None:
                    yield 0, chunk
        opened: list[_OpenPart] = []
        for index, of_first in sorted(parts.items()):
            first = SampleChunk.join(of_first, params=request.params)
            rest = await self._plan(request, first, index)
            if rest is None:
                yield 0, of_first[-1]
                continue
            opened.append(_OpenPart(index=index, first=first, given_ids=rest[0], request=rest[1]))
            yield 0, replace(of_first[-1], finish_reason=None, version_spans=(), routed_experts=None, queue_s=None)
            if len(rest[0]):
                nothing = np.full(len(rest[0]), np.nan, dtype=np.float32)
                yield 0, SampleChunk(index=index, completion_ids=rest[0], rollout_logprobs=nothing)
        if not opened:
            return
        async with aclosing(self._context.service.stream([each.request for each in opened])) as later:
            async for number, chunk in later:
                yield 0, opened[number].add(chunk)

    async def _plan(
        self, request: SampleRequest, first: SampledSequence, index: int
    ) -> tuple[TokenIds, SampleRequest] | None:
        """What follows the first part of a completion; closed reasoning is counted, and a cut that nothing follows."""
        length = self._context.service.engine.context_length
        rest = await wrap_future(
            self._context.text_threads.submit(self._bound.plan_rest, request, first, context_length=length, index=index)
        )
        if rest is None and first.finish_reason is FinishReason.LENGTH:
            self._context.service.count_end(first.finish_reason)
        if rest is not None and len(rest[0]):
            self._context.metrics.events.count(Event.CLOSING, "thinking")
        return rest


async def _constrain_reply(
    context: ServerContext, question: Question, renderer: Renderer, prompt: RequestPrompt
) -> StructuredOutput | None:
    """The constraint on the reply: the question's own, or calls in the model's own format.

    None for required calls that engine or renderer cannot require: `InsistingService` asks for them.

    Raises:
        InvalidInputError: the model's call format has no grammar.
    """
    functions = question.required_functions
    if not functions:
        return question.structured_output
    if not (context.service.engine.takes_structured_output and isinstance(renderer, ConstrainsCalls)):
        return None
    constrains = renderer
    tag = await wrap_future(
        context.text_threads.submit(
            constrains.constrain_calls, functions, prompt_ids=prompt.token_ids, several=question.may_call_several
        )
    )
    return StructuredOutput(structural_tag=tag)
