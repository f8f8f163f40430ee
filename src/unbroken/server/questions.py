"""Questions from the bodies of dialects that translate their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request

from unbroken.messages import ToolSchema
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.server.turns import Question, read_retry_hint
from unbroken.server.wire.conversation import Conversation
from unbroken.server.wire.sessions import get_session_id
from unbroken.server.wire.tool_choice import ToolChoice
from unbroken.types import StructuredOutput


class ConversationFields(Protocol):
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


async def make_question(
    context: ServerContext, request: Request, body: ConversationFields, conversation: Conversation, *, format_name: str
) -> Question:
    """Make the question of a body, whose conversation was translated; its images are loaded.

    `format_name` is the field of `structured_output`, for errors. Sampling is left as it is by default.

    Raises:
        HttpError: the model, an option or a choice is not one that this server has.
        UnbrokenError: an image cannot be used, or a key is not supported.
    """
    adapter = context.find_adapter(request, body.model)
    settings = context.images.encode_settings(body.mm_processor_kwargs)
    loaded: Any = await context.images.load_messages(conversation.messages, settings, places=conversation.image_places)
    tools, structured_output = body.make_tools(), body.structured_output
    choice = body.choose_tools(tools)
    if choice.required_functions and structured_output is not None:
        raise HttpError(400, f"{format_name} must be left out where calls are required", param=format_name)
    effort = body.effort
    options: Mapping[str, Any] = body.chat_template_kwargs or {}
    if effort is not None:
        chosen = await context.run_in_text_thread(
            lambda: _choose_reasoning_options(effort, reads_option=context.reads_option)
        )
        options = {**chosen, **options}
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
        adapter=adapter,
        session_id=get_session_id(request, None),
        retry=await read_retry_hint(request),
    )


def _choose_reasoning_options(effort: str | None, *, reads_option: Callable[[str], bool]) -> dict[str, Any]:
    """The template options for an effort; none for an option that the template does not read.

    "none" is `enable_thinking: false`, and any other effort is `reasoning_effort`. Without an effort, and for a
    template that knows neither, the model reasons as it does.
    """
    if effort is None:
        return {}
    name, value = ("enable_thinking", False) if effort == "none" else ("reasoning_effort", effort)
    return {name: value} if reads_option(name) else {}
