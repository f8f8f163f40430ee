"""Bodies of OpenAI's Responses, and their input as our messages. What this server does not have is refused by name.

    instructions                                one system message
    message                                     one message
    reasoning, message, function_call, ..       one assistant message: reasoning, content, calls
    function_call_output                        one tool message
    custom_tool_call, custom_tool_call_output   the same, of a function with the text `input`
    item_reference                              the item of an answer that is kept (`server.wire.answers`)

All items of the assistant that follow one another are one message: they are the items of one reply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import ConfigDict, Discriminator, Field, Tag

from unbroken.messages import Message, ToolCall, ToolSchema, make_call
from unbroken.server.http.bodies import BodyModel, OneOrSeveral, Texts, by_type
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.conversation import (
    ConversationBuilder,
    HostedTool,
    ToolChoice,
    is_seal,
    list_hosted,
    make_tool,
    refuse_misplaced,
    require_tool,
    simplify_parts,
    unpack_seal,
)
from unbroken.server.wire.fields import MESSAGE_KEYS, RESPONSES, RESPONSES_ITEMS, list_asked
from unbroken.server.wire.openai import SamplingFields
from unbroken.types import StructuredOutput

_LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
"""What `include` names to get the reasoning in a form that comes back whole."""


class _Item(BodyModel):
    model_config = ConfigDict(extra="allow")

    def refuse_extra(self, place: str) -> None:
        """Raise `HttpError` for a field that is not known."""
        RESPONSES_ITEMS.check(self.model_extra, place=place)


class _InputTextPart(_Item):
    """Text."""

    type: Literal["input_text", "output_text"]
    text: str


class _InputImagePart(_Item):
    """An image. `detail` has no effect."""

    type: Literal["input_image"]
    image_url: str
    """A URL, a data URL, or its hash."""


_PARTS = by_type("input_text", "output_text", "input_image", what="parts")
Part = Annotated[
    Annotated[_InputTextPart, Tag("<input_text>")]
    | Annotated[_InputTextPart, Tag("<output_text>")]
    | Annotated[_InputImagePart, Tag("<input_image>")],
    _PARTS[1],
    _PARTS[0],
]
TextOrParts = OneOrSeveral[str, Part]


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts


class _CallItem(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str | None = None
    """A JSON object as text; null and blank for none."""


class _OutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts


class _CustomCallItem(_Item):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str = Field(min_length=1)
    input: str
    """Any text."""


class _CustomOutputItem(_Item):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: TextOrParts


class ReferenceItem(_Item):
    """An item of an answer that is kept, by its id."""

    type: Literal["item_reference"]
    id: str


class _ReasoningText(BodyModel):
    """A text of a reasoning item."""

    model_config = ConfigDict(extra="allow")

    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class _ReasoningItem(_Item):
    """Reasoning of the model: its content, else what our encrypted content holds, else its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[_ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[_ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None


_ITEMS = by_type(
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
    what="items",
    default="message",
)
_OfReply: TypeAlias = MessageItem | _CallItem | _CustomCallItem | _ReasoningItem
_OfUser: TypeAlias = MessageItem | _OutputItem | _CustomOutputItem
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[_CallItem, Tag("<function_call>")]
    | Annotated[_OutputItem, Tag("<function_call_output>")]
    | Annotated[_CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[_CustomOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[_ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")],
    _ITEMS[1],
    _ITEMS[0],
]


class _FunctionTool(_Item):
    """A function of the client."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """No effect: calls follow the schema where they are required."""


_MEMBERS = by_type("function", what="tools in a namespace")


class _NamespaceTool(_Item):
    """Functions under a common name: the model sees `NAMESPACE__FUNCTION`. The description has no effect."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Annotated[list[Annotated[_FunctionTool, _MEMBERS[0]]], Field(fail_fast=True)]


class _CustomTool(_Item):
    """A tool that is called with any text: the model sees a function with the text `input`.

    A grammar of the text is in its description: it is not enforced.
    """

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None
    """Type `text`, or `grammar` with `syntax` and `definition`."""

    def describe(self) -> str | None:
        """What the model reads of it."""
        grammar = (self.format or {}).get("definition")
        if grammar is None:
            return self.description
        syntax = (self.format or {}).get("syntax")
        return "\n\n".join(filter(None, (self.description, f"`input` follows this grammar ({syntax}):\n{grammar}")))


_TOOLS = ("function", "namespace", "custom")


def _find_tool(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return f"<{kind}>" if kind in _TOOLS else "<hosted>"


Tool = Annotated[
    Annotated[_FunctionTool, Tag("<function>")]
    | Annotated[_NamespaceTool, Tag("<namespace>")]
    | Annotated[_CustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_find_tool, custom_error_type="object", custom_error_message="must be an object with a type"),
]
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool."""


def _flatten_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it."""
    return name if namespace is None else f"{namespace}__{name}"


class _TextOptions(BodyModel):
    """The form of the reply's text. `verbosity` has no effect."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None
    """Type `text`, `json_object`, or `json_schema` with a schema."""


class _ReasoningOptions(BodyModel):
    """How much to reason. `summary` has no effect: the reasoning itself is in the answer."""

    model_config = ConfigDict(extra="allow")

    effort: str | None = None
    """The template's variable `reasoning_effort`, if it reads it; "none": `enable_thinking: false`, likewise."""
    max_tokens: int | None = Field(default=None, ge=1)
    """As OpenRouter has it: the reasoning is closed after so many ids of the reply; ignored for a template without."""


class ResponsesBody(BodyModel):
    """A conversation to answer."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """The served model, which may be left out, or an adapter."""
    input: OneOrSeveral[str, Item]
    instructions: str | None = None
    """A system message before the input."""
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    """Functions, namespaces of functions, custom tools. Those that OpenAI runs are left out."""
    tool_choice: Any = None
    """"auto"; "none" to read no calls (the tools are rendered all the same); "required", or a function or custom tool
    to call, as `{"type": "function", "name": ...}`."""
    parallel_tool_calls: bool | None = None
    """False for exactly one call where calls are required; no effect where the model decides whether it calls."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """A maximum: if it exceeds the context, or without it, what fits."""
    temperature: float | None = None
    top_p: float | None = None
    text: _TextOptions | None = None
    reasoning: _ReasoningOptions | None = None
    include: Texts | None = None
    metadata: dict[str, Any] | None = None
    """Comes back in the answer."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto`: of a conversation that is too long, the oldest messages after its first question are left out."""
    store: bool | None = None
    """False: the answer is not kept for `previous_response_id` and references to its items."""
    previous_response_id: str | None = None
    """An answer that is kept: its input and output come before this input, its instructions do not."""
    conversation: str | dict[str, Any] | None = None
    """The id of a conversation (`/v1/conversations`), or an object with it: it gets the input and the answer."""
    stream: bool | None = None
    """Answer with server-sent events."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation."""
        given = self.conversation
        name = given.get("id") if isinstance(given, dict) else given
        if given is not None and not isinstance(name, str):
            raise HttpError(
                400, f"conversation must be an id, or an object with one, got {shorten(given)}", param="conversation"
            )
        return name

    def check_supported(self) -> list[str]:
        """The names of fields that are ignored. Raises `HttpError` for what this server does not support."""
        if self.previous_response_id is not None and self.conversation is not None:
            raise HttpError(
                400,
                "previous_response_id must be left out with a conversation, which has its answers",
                param="previous_response_id",
            )
        ignored = RESPONSES.check(self.model_extra)
        for name, options in (("text", self.text), ("reasoning", self.reasoning)):
            ignored += [] if options is None else list_asked(options.model_extra, name)
        if _LOGPROBS in (self.include or ()):
            raise HttpError(
                400, f"include must not have {_LOGPROBS!r}: chat completions have logprobs", param="include"
            )
        self._check_tools()
        return [*ignored, *list_hosted(self.tools or ())]

    def _check_tools(self) -> None:
        """Refuse what a tool has besides its fields; hosted tools are left out of the prompt as a whole."""
        for k, tool in enumerate(self.tools or ()):
            if isinstance(tool, HostedTool):
                continue
            tool.refuse_extra(f"tools.{k}")
            for number, member in enumerate(tool.tools if isinstance(tool, _NamespaceTool) else ()):
                member.refuse_extra(f"tools.{k}.tools.{number}")

    def make_tools(self) -> list[ToolSchema]:
        """The tools in the OpenAI form of chat completions."""
        return [
            make_tool(tool.name, tool.describe(), CUSTOM_INPUT)
            if isinstance(tool, _CustomTool)
            else make_tool(_flatten_name(namespace, tool.name), tool.description, tool.parameters)
            for namespace, tool in self._list_functions()
        ]

    def find_custom(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, _CustomTool))

    def find_namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of each function in a namespace, by the name that the model sees."""
        return {
            _flatten_name(namespace, tool.name): (namespace, tool.name)
            for namespace, tool in self._list_functions()
            if namespace is not None
        }

    def _list_functions(self) -> list[tuple[str | None, _FunctionTool | _CustomTool]]:
        functions: list[tuple[str | None, _FunctionTool | _CustomTool]] = []
        for tool in self.tools or ():
            if isinstance(tool, _NamespaceTool):
                functions += [(tool.name, member) for member in tool.tools]
            elif not isinstance(tool, HostedTool):
                functions.append((None, tool))
        return functions

    def choose_tools(self, tools: list[ToolSchema]) -> ToolChoice:
        """What the reply may call. Raises `HttpError` for a choice that cannot be made."""
        several = self.parallel_tool_calls is not False
        match self.tool_choice:
            case "none":
                return ToolChoice(reads_calls=False)
            case None | "auto":
                return ToolChoice(reads_calls=bool(tools))
            case "required":
                functions = require_tool(tools, name=None, choice=self.tool_choice)
                return ToolChoice(reads_calls=True, required_functions=functions, may_call_several=several)
            case {"type": "function" | "custom", "name": str(name)}:
                functions = require_tool(tools, name=name, choice=self.tool_choice)
                return ToolChoice(reads_calls=True, required_functions=functions, may_call_several=False)
        raise HttpError(
            400,
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'name': ...}, got "
            f"{shorten(self.tool_choice)}",
            param="tool_choice",
        )

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint of `text.format`."""
        match None if self.text is None else self.text.format:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return StructuredOutput(json_schema='{"type": "object"}')
            case {"type": "json_schema", "schema": dict(schema)}:
                return StructuredOutput(json_schema=json.dumps(schema))
            case wanted:
                raise HttpError(
                    400,
                    "text.format must be of type text, json_object, or json_schema with a schema, got "
                    f"{shorten(wanted)}",
                    param="text.format",
                )

    @property
    def effort(self) -> str | None:
        """The wish how much to reason; "none" for not at all."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def effort_field(self) -> str:
        """The field that `effort` is from."""
        return "reasoning.effort"

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The field that bounds the reasoning, with its number of ids."""
        number = None if self.reasoning is None else self.reasoning.max_tokens
        return None if number is None else ("reasoning.max_tokens", number)

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning items have `encrypted_content`."""
        return SEALED in (self.include or ())

    @property
    def sampling(self) -> SamplingFields:
        """The sampling parameters."""
        return SamplingFields(temperature=self.temperature, top_p=self.top_p)


@dataclass(slots=True)
class _Reply:
    """The items of one reply."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def read_conversation(
    body: ResponsesBody,
    items: Sequence[Item] | None = None,
    *,
    earlier: Sequence[Message] = (),
    num_earlier: int = 0,
) -> ConversationBuilder:
    """Translate a body's instructions and input.

    `items` come instead of its input, with `num_earlier` of other requests at the beginning, after `earlier` messages.

    Raises:
        HttpError: a part is not allowed in its item, an output answers no call, or reasoning cannot be read.
        SamplingError: an item has a key that is not supported.
    """
    conversation = ConversationBuilder()
    if body.instructions:
        conversation.messages.append({"role": "system", "content": body.instructions})
    conversation.add_earlier(earlier)
    if items is None and isinstance(body.input, str):
        conversation.messages.append({"role": "user", "content": body.input})
        return conversation
    reply: _Reply | None = None
    for k, item in enumerate(cast(Sequence[Item], body.input) if items is None else items):
        place = f"input.{k - num_earlier}"
        conversation.check_extra(RESPONSES_ITEMS, item.model_extra, place)
        if isinstance(item, ReferenceItem):
            raise HttpError(400, f"{place}.id must be the id of an item that is kept", param=f"{place}.id")
        if _is_of_reply(item):
            reply = reply or _Reply()
            _add_to_reply(conversation, reply, place, cast(_OfReply, item))
            continue
        _end_reply(conversation, reply)
        reply = None
        conversation.messages.append(_read_given(conversation, place, cast(_OfUser, item)))
    _end_reply(conversation, reply)
    return conversation


def _is_of_reply(item: Item) -> bool:
    """Whether an item is a part of what the model said."""
    is_message = isinstance(item, MessageItem) and item.role == "assistant"
    return is_message or isinstance(item, (_CallItem, _CustomCallItem, _ReasoningItem))


def _end_reply(conversation: ConversationBuilder, reply: _Reply | None) -> None:
    if reply is not None:
        conversation.add_reply(content=reply.content, reasoning=reply.reasoning, calls=reply.calls)


def _check_reasoning(conversation: ConversationBuilder, place: str, item: _ReasoningItem) -> None:
    """Check the extra keys of the texts of a reasoning item."""
    for name, texts in (("summary", item.summary), ("content", item.content)):
        for text in texts or ():
            conversation.check_extra(MESSAGE_KEYS, text.model_extra, f"{place}.{name}")


def _add_to_reply(
    conversation: ConversationBuilder,
    reply: _Reply,
    place: str,
    item: _OfReply,
) -> None:
    if isinstance(item, _CustomCallItem):
        reply.calls.append(make_call(item.call_id, item.name, json.dumps({"input": item.input}, ensure_ascii=False)))
    elif isinstance(item, _CallItem):
        arguments = item.arguments if item.arguments and item.arguments.strip() else "{}"
        _check_arguments(place, arguments)
        reply.calls.append(make_call(item.call_id, _flatten_name(item.namespace, item.name), arguments))
    elif isinstance(item, _ReasoningItem):
        _check_reasoning(conversation, place, item)
        reply.reasoning += _read_reasoning(place, item)
    elif isinstance(item.content, str):
        reply.content += item.content
    else:
        for k, part in enumerate(item.content):
            if not isinstance(part, _InputTextPart):
                raise refuse_misplaced(f"{place}.content.{k}", part.type, item.role)
            conversation.check_extra(RESPONSES_ITEMS, part.model_extra, f"{place}.content.{k}")
            reply.content += part.text


def _read_given(conversation: ConversationBuilder, place: str, item: _OfUser) -> Message:
    if isinstance(item, MessageItem):
        content = _read_content(conversation, f"{place}.content", item.content)
        return cast(Message, {"role": item.role, "content": content})
    conversation.check_answers(item.call_id, place=f"{place}.call_id", call="function_call")
    content = _read_content(conversation, f"{place}.output", item.output)
    return cast(Message, {"role": "tool", "tool_call_id": item.call_id, "content": content})


def _read_content(
    conversation: ConversationBuilder, place: str, content: str | list[_InputTextPart | _InputImagePart]
) -> Any:
    """One text as it is, anything else as parts."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for k, part in enumerate(content):
        conversation.check_extra(RESPONSES_ITEMS, part.model_extra, f"{place}.{k}")
        if isinstance(part, _InputTextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append(conversation.make_image_part(part.image_url, place=f"{place}.{k}.image_url"))
    return simplify_parts(parts)


def _read_reasoning(place: str, item: _ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content and is_seal(item.encrypted_content):
        text = unpack_seal(item.encrypted_content)
        if text is None:
            raise HttpError(
                400,
                f"{place}.encrypted_content must come back as this server wrote it",
                param=f"{place}.encrypted_content",
            )
        return text
    if item.summary:
        return "\n\n".join(part.text for part in item.summary)
    if item.encrypted_content:
        raise HttpError(
            400,
            f"{place} must have content or a summary: its encrypted_content is another server's",
            param=f"{place}.encrypted_content",
        )
    return ""


def _check_arguments(place: str, arguments: str) -> None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HttpError(
            400,
            f"{place}.arguments must be a JSON object as text, got {shorten(arguments)}",
            param=f"{place}.arguments",
        )
