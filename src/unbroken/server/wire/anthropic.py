"""Bodies of Anthropic's Messages, and their messages as ours. What this server does not have is refused by name.

user        text, image                 one user message
user        tool_result, .., text       a tool message for each result, then a user message
assistant   thinking, text, tool_use    one assistant message: reasoning, content, calls
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Discriminator, Field, Tag

from unbroken.messages import Message, ToolSchema, make_call
from unbroken.server.http.bodies import BodyModel, OneOrSeveral, Texts, by_type
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.conversation import (
    ConversationBuilder,
    HostedTool,
    ToolChoice,
    fits_seal,
    is_seal,
    list_hosted,
    make_tool,
    refuse_misplaced,
    require_tool,
    simplify_parts,
    unpack_seal,
)
from unbroken.server.wire.fields import MESSAGE_KEYS, MESSAGES, MESSAGES_BLOCKS, list_asked
from unbroken.server.wire.openai import SamplingFields
from unbroken.types import StructuredOutput


class _Block(BodyModel):
    """A content block."""

    model_config = ConfigDict(extra="allow")

    def refuse_extra(self, place: str) -> None:
        """Raise `HttpError` for a field that is not known."""
        MESSAGES_BLOCKS.check(self.model_extra, place=place)


class _TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class _Base64Source(BodyModel):
    """An image in the request."""

    type: Literal["base64"]
    media_type: str
    data: str


class _UrlSource(BodyModel):
    """An image by its URL, or its hash."""

    type: Literal["url"]
    url: str


_SOURCES = by_type("base64", "url", what="sources of images")
Source = Annotated[
    Annotated[_Base64Source, Tag("<base64>")] | Annotated[_UrlSource, Tag("<url>")], _SOURCES[1], _SOURCES[0]
]


class _ImageBlock(_Block):
    """An image."""

    type: Literal["image"]
    source: Source


class _ThinkingBlock(_Block):
    """Reasoning of the model. A signature of this server must fit its text; another one is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _ToolUseBlock(_Block):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


_RESULTS = by_type("text", "image", what="blocks in a tool result")
ResultBlock = Annotated[
    Annotated[_TextBlock, Tag("<text>")] | Annotated[_ImageBlock, Tag("<image>")], _RESULTS[1], _RESULTS[0]
]


class _ToolResultBlock(_Block):
    """The result of a call. The template sees `is_error` as a key of the tool message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: OneOrSeveral[str, ResultBlock] | None = None
    is_error: bool | None = None


_BLOCKS = by_type("text", "image", "thinking", "tool_use", "tool_result", what="content blocks")
Block = Annotated[
    Annotated[_TextBlock, Tag("<text>")]
    | Annotated[_ImageBlock, Tag("<image>")]
    | Annotated[_ThinkingBlock, Tag("<thinking>")]
    | Annotated[_ToolUseBlock, Tag("<tool_use>")]
    | Annotated[_ToolResultBlock, Tag("<tool_result>")],
    _BLOCKS[1],
    _BLOCKS[0],
]
Content = OneOrSeveral[str, Block]
_SYSTEM = by_type("text", what="blocks of system")
SystemBlock = Annotated[Annotated[_TextBlock, Tag("<text>")], _SYSTEM[0]]


class _InputMessage(BodyModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system"]
    content: Content


class _ClientTool(_Block):
    """A function of the client."""

    type: Literal["custom"] | None = None
    """`custom`, or left out."""
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: Any = None
    strict: bool | None = None
    """No effect: calls follow the schema where they are required."""
    eager_input_streaming: bool | None = None
    """No effect: calls are streamed once they are whole."""


def _find_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<hosted>" if isinstance(kind, str) and kind != "custom" else "<client>"


Tool = Annotated[
    Annotated[_ClientTool, Tag("<client>")] | Annotated[HostedTool, Tag("<hosted>")], Discriminator(_find_tool)
]


class _Thinking(BodyModel):
    """Whether the reply has its reasoning, and how."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    """The reasoning is closed after so many ids of the reply; ignored for a template without reasoning."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: blocks without text, whose signature brings it back."""


class ConversationBody(BodyModel):
    """A conversation, in the fields that counting and answering share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """The served model, which may be left out, or an adapter."""
    messages: Annotated[list[_InputMessage], Field(fail_fast=True)]
    system: OneOrSeveral[str, SystemBlock] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    """Functions of the client. Anthropic's own, which have no schema, are left out."""
    tool_choice: dict[str, Any] | None = None
    """`{"type": "auto"}`, `any`, `none`, or `tool` with a `name`. `disable_parallel_tool_use` only where calls are
    required."""
    thinking: _Thinking | None = None
    output_config: dict[str, Any] | None = None
    """`format`: a JSON schema for the text; `effort`: the template's variable `reasoning_effort`, if it reads it."""
    context_management: dict[str, Any] | None = None
    """Only edits that keep everything."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""

    def check_supported(self) -> list[str]:
        """The names of fields that are ignored. Raises `HttpError` for what this server does not support."""
        ignored = MESSAGES.check(self.model_extra)
        ignored += list_asked(self.output_config, "output_config", frozenset({"format", "effort"}))
        for edit in (self.context_management or {}).get("edits") or ():
            if not (isinstance(edit, dict) and edit.get("keep") == "all"):
                raise HttpError(
                    400,
                    f"context_management.edits must keep everything ('keep': 'all'), got {shorten(edit)}: this server "
                    "does not edit conversations",
                    param="context_management",
                )
        for k, tool in enumerate(self.tools or ()):
            if isinstance(tool, HostedTool):
                continue
            if tool.input_schema is None:
                raise HttpError(
                    400,
                    f"tools.{k}.input_schema is required: the arguments of {shorten(tool.name)} as a JSON schema",
                    param=f"tools.{k}.input_schema",
                )
            tool.refuse_extra(f"tools.{k}")
        return [*ignored, *list_hosted(self.tools or ())]

    def make_tools(self) -> list[ToolSchema]:
        """The tools in the OpenAI form."""
        functions = (tool for tool in self.tools or () if isinstance(tool, _ClientTool))
        return [make_tool(tool.name, tool.description, tool.input_schema) for tool in functions]

    def choose_tools(self, tools: list[ToolSchema]) -> ToolChoice:
        """What the reply may call. Raises `HttpError` for a choice that cannot be made."""
        choice = self.tool_choice or {"type": "auto"}
        several = choice.get("disable_parallel_tool_use") is not True
        match choice:
            case {"type": "none"}:
                return ToolChoice(reads_calls=False)
            case {"type": "auto"} if several or not tools:
                return ToolChoice(reads_calls=bool(tools))
            case {"type": "auto"}:
                raise HttpError(
                    400,
                    "tool_choice.disable_parallel_tool_use must be left out or false with tool_choice 'auto', where "
                    "the model decides how many tools it calls: require a call ('any' or 'tool') for exactly one",
                    param="tool_choice",
                )
            case {"type": "any"}:
                functions = require_tool(tools, name=None, choice=choice)
                return ToolChoice(reads_calls=True, required_functions=functions, may_call_several=several)
            case {"type": "tool", "name": str(name)}:
                functions = require_tool(tools, name=name, choice=choice)
                return ToolChoice(reads_calls=True, required_functions=functions, may_call_several=False)
        raise HttpError(
            400,
            "tool_choice must be of type 'auto', 'any', 'none', or 'tool' with a name, got "
            f"{shorten(self.tool_choice)}",
            param="tool_choice",
        )

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint of `output_config.format`."""
        match (self.output_config or {}).get("format"):
            case None:
                return None
            case {"type": "json_schema", "schema": dict(schema)}:
                return StructuredOutput(json_schema=json.dumps(schema))
            case wanted:
                raise HttpError(
                    400,
                    f"output_config.format must be of type json_schema with a schema, got {shorten(wanted)}",
                    param="output_config.format",
                )

    @property
    def effort(self) -> str | None:
        """The wish how much to reason; "none" for not at all."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = (self.output_config or {}).get("effort")
        if not (effort is None or isinstance(effort, str)):
            raise HttpError(
                400, f"output_config.effort must be text, got {shorten(effort)}", param="output_config.effort"
            )
        return effort

    @property
    def effort_field(self) -> str:
        """The field that `effort` is from."""
        is_off = self.thinking is not None and self.thinking.type == "disabled"
        return "thinking" if is_off else "output_config.effort"

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The field that bounds the reasoning, with its number of ids."""
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled" or (thinking.budget_tokens or 0) < 1:
            return None
        return "thinking.budget_tokens", thinking.budget_tokens or 0


class MessagesBody(ConversationBody):
    """A conversation to answer."""

    max_tokens: int = Field(ge=1)
    """A maximum: if it exceeds the context, what fits."""
    stop_sequences: Texts | None = None
    stream: bool | None = None
    """Answer with server-sent events."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @property
    def sampling(self) -> SamplingFields:
        """The sampling parameters."""
        return SamplingFields(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences
        )


def read_conversation(body: ConversationBody) -> ConversationBuilder:
    """Translate a body's system prompt and messages.

    Raises:
        HttpError: a block is not allowed in its message, a result answers no call, or a signature does not fit.
        SamplingError: a block has a key that is not supported.
    """
    conversation = ConversationBuilder()
    if body.system:
        blocks = [_TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system
        content = _read_content(conversation, ((f"system.{k}", block) for k, block in enumerate(blocks)))
        conversation.messages.append({"role": "system", "content": content})
    for k, message in enumerate(body.messages):
        conversation.check_extra(MESSAGE_KEYS, message.model_extra, f"messages.{k}")
        if message.role == "assistant":
            _read_assistant(conversation, f"messages.{k}", message)
        else:
            _read_user(conversation, f"messages.{k}", message)
    if body.messages and body.messages[-1].role == "assistant":
        raise HttpError(
            400,
            f"messages.{len(body.messages) - 1} must not be an assistant message: this server does not continue the "
            "text of a message (prefill)",
            param="messages",
        )
    return conversation


def _read_user(conversation: ConversationBuilder, name: str, message: _InputMessage) -> None:
    if isinstance(message.content, str):
        conversation.messages.append({"role": message.role, "content": message.content})
        return
    waiting: list[tuple[str, _TextBlock | _ImageBlock]] = []

    def end_message() -> None:
        if waiting:
            content = _read_content(conversation, waiting)
            conversation.messages.append({"role": message.role, "content": content})
            waiting.clear()

    for k, block in enumerate(message.content):
        place = f"{name}.content.{k}"
        if isinstance(block, _ToolResultBlock) and message.role == "user":
            end_message()
            conversation.messages.append(_read_result(conversation, place, block))
        elif isinstance(block, _TextBlock) or (isinstance(block, _ImageBlock) and message.role == "user"):
            waiting.append((place, block))
        else:
            raise refuse_misplaced(place, block.type, message.role)
    end_message()


def _read_result(conversation: ConversationBuilder, place: str, block: _ToolResultBlock) -> Message:
    conversation.check_extra(MESSAGES_BLOCKS, block.model_extra, place)
    conversation.check_answers(block.tool_use_id, place=f"{place}.tool_use_id", call="tool_use block")
    content: Any = block.content or ""
    if not isinstance(content, str):
        content = _read_content(conversation, ((f"{place}.content.{k}", one) for k, one in enumerate(content)))
    message: dict[str, Any] = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if block.is_error:
        message["is_error"] = True
    return cast(Message, message)


def _read_assistant(conversation: ConversationBuilder, name: str, message: _InputMessage) -> None:
    if isinstance(message.content, str):
        conversation.messages.append({"role": "assistant", "content": message.content})
        return
    content, reasoning, calls = "", "", []
    for k, block in enumerate(message.content):
        place = f"{name}.content.{k}"
        if isinstance(block, _TextBlock):
            content += block.text
        elif isinstance(block, _ThinkingBlock):
            reasoning += _read_thinking(place, block)
        elif isinstance(block, _ToolUseBlock):
            calls.append(make_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
        else:
            raise refuse_misplaced(place, block.type, message.role)
        conversation.check_extra(MESSAGES_BLOCKS, block.model_extra, place)
    conversation.add_reply(content=content, reasoning=reasoning, calls=calls)


def _read_thinking(place: str, block: _ThinkingBlock) -> str:
    """The reasoning of a block: its text, or what its signature brings back where the text was omitted."""
    if not is_seal(block.signature) or fits_seal(block.signature, block.thinking):
        return block.thinking
    packed = unpack_seal(block.signature)
    if packed is None or block.thinking:
        raise HttpError(
            400,
            f"{place}.signature must fit the block's thinking, which this server wrote: send both back as they came, "
            "or leave the block out",
            param=f"{place}.signature",
        )
    return packed


def _read_content(conversation: ConversationBuilder, blocks: Iterable[tuple[str, _TextBlock | _ImageBlock]]) -> Any:
    """One text as it is, anything else as parts."""
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        conversation.check_extra(MESSAGES_BLOCKS, block.model_extra, place)
        if isinstance(block, _TextBlock):
            parts.append({"type": "text", "text": block.text})
            continue
        source = block.source
        if isinstance(source, _Base64Source):
            url, field = f"data:{source.media_type};base64,{source.data}", "data"
        else:
            url, field = source.url, "url"
        parts.append(conversation.make_image_part(url, place=f"{place}.source.{field}"))
    return simplify_parts(parts)
