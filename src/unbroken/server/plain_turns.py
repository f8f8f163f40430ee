"""Turns without sessions: every question is rendered afresh."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.requests import Request

from unbroken.rendering.base import ConstrainsCalls, Renderer
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.server.images.intake import Prompt
from unbroken.server.service import SamplingService
from unbroken.server.texts import check_conversation
from unbroken.server.turns import OpenTurn, Question
from unbroken.server.wire.reply import WholeReply
from unbroken.types import SampleChunk, SampleRequest, SampleResult, StructuredOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTurn:
    """A turn that goes to the engine as it is. See `OpenTurn`."""

    service: SamplingService
    answer_id: str
    renderer: Renderer
    request: SampleRequest
    replies: Mapping[int, WholeReply] = field(default_factory=dict)

    async def sample(self) -> SampleResult:
        """See `OpenTurn`."""
        (result,) = await self.service.sample([self.request])
        return result

    async def stream(self) -> AsyncGenerator[SampleChunk]:
        """See `OpenTurn`."""
        async with aclosing(self.service.stream([self.request])) as chunks:
            async for _, chunk in chunks:
                yield chunk


class PlainTurns:
    """Opens turns that are rendered afresh. See `TurnOpener`."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def open(self, request: Request, question: Question, *, id_prefix: str) -> OpenTurn:
        """See `TurnOpener`."""
        renderer, prompt = await render_question(self._context, question)
        return await continue_prompt(self._context, question, renderer, prompt, id_prefix=id_prefix)

    async def close(self) -> None:
        """See `TurnOpener`: nothing is kept."""


async def render_question(context: ServerContext, question: Question) -> tuple[Renderer, Prompt]:
    """Render a question's messages and tools, in a text thread.

    Raises:
        HttpError: the conversation is longer than the context, or a template option is reserved.
        UnbrokenError: the messages or tools are invalid, or the template refuses them.
    """

    def render() -> tuple[Renderer, Prompt]:
        check_conversation(context, question.messages, question.tools, question.template_options)
        renderer = context.get_renderer(question.template_options, question.image_settings)
        rendered = renderer.render(question.messages, tools=question.tools)
        return renderer, Prompt(token_ids=rendered.token_ids, images=rendered.images)

    return await context.run_in_text_thread(render)


async def continue_prompt(
    context: ServerContext, question: Question, renderer: Renderer, prompt: Prompt, *, id_prefix: str
) -> PlainTurn:
    """Open the turn that continues this prompt.

    Raises:
        HttpError: calls are required and cannot be had, or a limit is exceeded.
        SamplingError: a sampling parameter is out of range.
        ContextOverflowError: prompt and `max_tokens` exceed the context.
    """
    params = question.sampling.to_params(
        end_ids=renderer.get_stop_token_ids(),
        max_tokens=question.choose_max_tokens(
            len(prompt.token_ids), context_length=context.service.engine.context_length
        ),
        num_top_logprobs=question.num_top_logprobs,
        structured_output=await constrain_reply(context, question, renderer, prompt),
    )
    answer_id = f"{id_prefix}{uuid4().hex}"
    (request,) = context.service.make_requests(
        [prompt], params, n=question.n, adapter=question.adapter, session_id=question.session_id, name=answer_id
    )
    return PlainTurn(service=context.service, answer_id=answer_id, renderer=renderer, request=request)


async def constrain_reply(
    context: ServerContext, question: Question, renderer: Renderer, prompt: Prompt
) -> StructuredOutput | None:
    """The constraint on the reply: the question's own, or calls in the model's own format.

    Raises:
        HttpError: calls are required, and engine or renderer cannot require them.
    """
    functions = question.required_functions
    if not functions:
        return question.structured_output
    engine = context.service.engine
    if not engine.takes_structured_output:
        raise HttpError(
            400,
            f"a required call needs structured output, which {type(engine).__name__} does not have: serve with "
            "--engine vllm, or let the model decide (tool_choice 'auto')",
            param="tool_choice",
        )
    if not isinstance(renderer, ConstrainsCalls):
        raise HttpError(
            400, f"tool_choice must be 'auto' or 'none' with {type(renderer).__name__}", param="tool_choice"
        )
    constrains = renderer
    tag = await context.run_in_text_thread(
        lambda: constrains.constrain_calls(functions, prompt_ids=prompt.token_ids, several=question.may_call_several)
    )
    return StructuredOutput(structural_tag=tag)
