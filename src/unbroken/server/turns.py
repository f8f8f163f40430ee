"""What a dialect asks and what it gets: one question, and the turn that answers it.

    question = Question(messages=[...], tools=[...], sampling=body, ...)            a dialect translates its body
    turn = await context.turns.open(request, question, id_prefix="chatcmpl-")       prompt ids, and checked parameters
    result = await turn.sample()                                                    or turn.stream(), once

A dialect does not know who answers: `PlainTurns` renders every question afresh; a session continues recorded ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Renderer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rollout.thinking import ThinkingBound
from unbroken.server.policies import Policy
from unbroken.server.wire.openai import SamplingFields, choose_max_tokens
from unbroken.server.wire.reply import ReplyReader, WholeReply
from unbroken.types import SampleChunk, SampleRequest, SampleResult, SamplingParams, StructuredOutput

SESSION_HEADER = "X-Session-ID"
"""Names the conversation that a request belongs to, as vLLM's clients give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryHint:
    """What tells a retry from a new request."""

    body_sha256: str
    """Of the path and the body as they came, in hexadecimal: a retry has the same bytes."""
    idempotency_key: str | None = None
    """The header Idempotency-Key."""
    retry_count: int | None = None
    """The header x-stainless-retry-count of the SDKs of OpenAI and Anthropic: 0 for a first try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How many ids the reply's reasoning may have (`rollout.thinking`)."""

    num_ids: int
    field: str
    """The field that it is from, for errors."""
    note_ignored: Callable[[Sequence[str]], None] | None = None
    """Names the field in the answer's header where no budget can be kept; None: then the request is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Continue this conversation."""

    messages: Sequence[Message]
    """In the OpenAI form, with the images loaded."""
    tools: Sequence[ToolSchema] = ()
    reads_calls: bool = False
    """Whether the reply can have calls; if not, their text is content."""
    required_functions: Sequence[ToolSchema] = ()
    """The tools of which one must be called; none if the reply is free."""
    may_call_several: bool = True
    """Whether required calls may be more than one."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`: variables of the template."""
    image_settings: str = "{}"
    """As in `ImageSpan`."""
    sampling: SamplingFields = field(default_factory=SamplingFields)
    """The dialect's own values."""
    max_tokens: int | None = None
    """None for all that fit."""
    caps_max_tokens: bool = False
    """Whether `max_tokens` is a maximum that may exceed the context: then all that fits, as Anthropic's API does."""
    num_top_logprobs: int = 0
    structured_output: StructuredOutput | None = None
    """The constraint of the dialect's response format; not together with `required_functions`."""
    thinking: ThinkingBudget | None = None
    n: int = 1
    policy: Policy | None = None
    """None if the asker names none: then it is the session's, or the served model."""
    session_id: str | None = None
    """Name of the conversation for affinity, as the client gives it."""
    conversation: str | None = None
    """Name of the conversation of Responses that the answer is added to."""
    returns_kept_ids: bool = False
    """Whether the answer is recorded with the ids that it was sampled from."""
    controls: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the dialect has no field for, by the names of `SamplingParams`."""
    retry: RetryHint

    def choose_max_tokens(self, prompt_length: int, *, context_length: int) -> int:
        """Maximum number of ids to sample after a prompt."""
        fitting = choose_max_tokens(prompt_length, wanted=None, context_length=context_length)
        if self.max_tokens is None:
            return fitting
        return min(self.max_tokens, fitting) if self.caps_max_tokens else self.max_tokens

    def bound_thinking(self, renderer: Renderer, params: SamplingParams) -> ThinkingBound | None:
        """The bound of the reply's reasoning; None without a budget, or if it is ignored. Blocks.

        Raises:
            InvalidInputError: the budget cannot be kept, and its dialect does not ignore it.
        """
        budget = self.thinking
        if budget is None:
            return None
        try:
            if self.required_functions:
                raise InvalidInputError(
                    f"{budget.field} must be left out where calls are required, got {budget.num_ids}"
                )
            return ThinkingBound.of(budget.num_ids, renderer, params, name=budget.field)
        except InvalidInputError:
            if budget.note_ignored is None:
                raise
            budget.note_ignored([budget.field])
            return None


class OpenTurn(Protocol):
    """One question that is being answered: call `sample` or `stream`, once."""

    @property
    def answer_id(self) -> str:
        """The id of the answer, from which also the ids of its calls are made."""
        ...

    @property
    def renderer(self) -> Renderer:
        """Reads the reply."""
        ...

    @property
    def request(self) -> SampleRequest:
        """What the engine is asked."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether the last chunk of a completion comes when it is on disk."""
        ...

    @property
    def replies(self) -> Mapping[int, WholeReply]:
        """The replies of completions that were read already, because they are recorded; once they are sampled."""
        ...

    async def sample(self) -> SampleResult:
        """Sample the whole reply. Raises as `SamplingService.sample` does."""
        ...

    def stream(self) -> AsyncGenerator[SampleChunk]:
        """Yield the reply as it is sampled. Raises as `SamplingService.stream` does.

        A session holds the last chunk of a completion back until the turn is durable.
        """
        ...

    async def keep_streamed(self, index: int, reply: ReplyReader) -> None:
        """Keep what is about to be sent of a completion that is not recorded yet: its agent may send it back."""
        ...


class TurnOpener(Protocol):
    """Opens the turns of all dialects."""

    async def open(self, request: Request, question: Question, *, id_prefix: str) -> OpenTurn:
        """Open the turn that answers a question; nothing is sampled yet. `id_prefix` begins the answer's id.

        Raises:
            HttpError: the question cannot be answered here.
            UnbrokenError: messages, tools, images or sampling parameters are invalid.
        """
        ...

    async def recall(self, request: Request, answer_id: str) -> Sequence[Message] | None:
        """The messages up to the reply that had this id; None if it is not recorded."""
        ...

    async def open_conversation(self, request: Request, name: str, items: Sequence[Mapping[str, Any]]) -> bool:
        """Store a conversation of Responses that begins with these items; false where nothing is stored."""
        ...

    async def recall_conversation(self, request: Request, name: str) -> Mapping[str, Any] | None:
        """What is stored of a conversation: its first `items`, or the `answer_id` of its last answer; None if it is
        not stored.
        """
        ...

    async def close(self) -> None:
        """End what is kept between turns, when the server stops."""
        ...


class _EventFormatter(Protocol):
    """Formats the events of one streamed completion."""

    @property
    def reply(self) -> ReplyReader:
        """Reads the completion; it has what the events so far are made of."""
        ...

    def format_events(self, chunk: SampleChunk) -> Iterator[dict[str, Any]]:
        """The events of one chunk."""
        ...


async def stream_events(
    turn: OpenTurn, formatters: Sequence[_EventFormatter]
) -> AsyncGenerator[Sequence[dict[str, Any]]]:
    """Yield the events of a turn as it is sampled; `formatters` has one for each of its completions.

    An agent acts on a call as soon as it has it, so that of a turn that is recorded a call leaves when it is on disk:
    whatever is killed afterwards, the turn that acted is there. Text leaves when it is kept: what an agent has of a
    stream that broke is the policy's, also after this process was killed.
    """
    held: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(turn.stream()) as chunks:
        async for chunk in chunks:
            formatter = formatters[chunk.index]
            events = held.pop(chunk.index, [])
            try:
                events.extend(formatter.format_events(chunk))
            finally:  # also those before an error
                is_open = turn.is_recorded and chunk.finish_reason is None
                if is_open and formatter.reply.calls:
                    held[chunk.index] = events
                elif events:
                    if is_open:
                        await turn.keep_streamed(chunk.index, formatter.reply)
                    yield events


async def read_retry_hint(request: Request) -> RetryHint:
    """Read what tells a retry from a new request."""
    digest = hashlib.sha256(request.url.path.encode() + b"\0" + await request.body())
    count = request.headers.get("x-stainless-retry-count", "")
    return RetryHint(
        body_sha256=digest.hexdigest(),
        idempotency_key=request.headers.get("idempotency-key"),
        retry_count=int(count) if count.isascii() and count.isdigit() and len(count) < 10 else None,
    )


def open_reply(
    turn: OpenTurn, question: Question, codec: TextCodec, events: Counters, *, index: int = 0
) -> ReplyReader:
    """Open the reader of one completion of a turn; `events` counts what cannot be parsed."""
    return ReplyReader(
        renderer=turn.renderer,
        prompt_ids=turn.request.prompt_ids,
        tools=question.tools,
        reads_calls=question.reads_calls,
        codec=codec,
        cutter=question.sampling.make_cutter(),
        events=events,
        name=f"{turn.answer_id}/{index}",
    )


def get_session_id(request: Request, given: str | None) -> str | None:
    """The body's `session_id`, else the header's; None without a name."""
    return given or request.headers.get(SESSION_HEADER) or None
