"""Bodies of Gemini's generateContent, and their contents as our messages. What this server does not have is refused.

user        text, inlineData, fileData           one user message
user        functionResponse, .., text           a tool message for each response, then a user message
model       thought, text, functionCall          one assistant message: reasoning, content, calls
model, model                                     the chunks of one reply, as SDKs keep those of a stream

Names may be in camelCase or in snake_case, as Google's servers take both.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from unbroken.messages import Message, ToolCall, ToolSchema, make_call
from unbroken.server.http.bodies import BodyModel, Texts
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.wire.conversation import (
    ConversationBuilder,
    ToolChoice,
    get_name,
    is_seal,
    make_seal,
    make_tool,
    refuse_misplaced,
    simplify_parts,
    unpack_seal,
)
from unbroken.server.wire.fields import GEMINI, GEMINI_CONFIG, GEMINI_PARTS, GEMINI_TOOLS, MESSAGE_KEYS
from unbroken.server.wire.openai import SamplingFields
from unbroken.types import StructuredOutput

_CALLING = "toolConfig.functionCallingConfig"
_STANDARD = str.maketrans("-_", "+/")
"""Google's SDKs write bytes in either alphabet of base64."""


class _Object(BodyModel):
    """An object of Google's API."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {to_camel(name) if "_" in name else name: one for name, one in value.items()}


def _as_list(value: Any) -> Any:
    """One object where a list is expected is a list of it: Google's servers take both, and its examples have both."""
    return [value] if isinstance(value, dict) else value


def _as_integer(value: Any) -> Any:
    """Google's `topK` is a float, so its SDK for Python writes 40 as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Blob(_Object):
    """A file in the request, in base64."""

    mime_type: str
    data: str


class _FileData(_Object):
    """A file by its URL, or its hash."""

    mime_type: str | None = None
    file_uri: str


class _CallPart(_Object):
    """A call."""

    id: str | None = None
    name: str = Field(min_length=1)
    args: dict[str, Any] | None = None


class _ResultImage(_Object):
    """An image in the response of a function."""

    inline_data: _Blob | None = None
    file_data: _FileData | None = None


class _FunctionResult(_Object):
    """The result of a call: of the one with this id, or the first of this name that has none yet."""

    id: str | None = None
    name: str | None = None
    response: dict[str, Any] | None = None
    """`{"output": ...}`, or `{"error": ...}`, which the template sees as `is_error`; else all of it is output."""
    parts: Annotated[list[_ResultImage], Field(fail_fast=True)] | None = None


class ContentPart(_Object):
    """A part of a content, with exactly one of text, file, call and response."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    """On the part after the reasoning, which it brings back. One of another server is not looked at."""
    inline_data: _Blob | None = None
    file_data: _FileData | None = None
    function_call: _CallPart | None = None
    function_response: _FunctionResult | None = None

    def get_kind(self, place: str) -> str:
        """The name of what the part has. Raises `HttpError` unless it is one thing that this server takes."""
        given = {
            "text": self.text,
            "inlineData": self.inline_data,
            "fileData": self.file_data,
            "functionCall": self.function_call,
            "functionResponse": self.function_response,
        }
        found = [name for name, value in given.items() if value is not None]
        if not found and self.thought_signature is not None:
            return "text"  # a signature that comes alone
        if len(found) != 1:
            raise HttpError(400, f"{place} must have exactly one of {', '.join(given)}, got {found}", param=place)
        return found[0]


class Content(_Object):
    """The parts of one side."""

    role: Literal["user", "model", "function"] | None = None
    """`user` if it is left out; `function` is an older name of it."""
    parts: Annotated[list[ContentPart], Field(fail_fast=True), BeforeValidator(_as_list)] | None = None


class _FunctionDeclaration(_Object):
    """A function of the client. Its parameters are a schema in Google's form (`OBJECT` as type), or a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _ToolGroup(_Object):
    """Functions of the client. Google's own tools are left out of the prompt, and named in `X-Unbroken-Ignored`."""

    function_declarations: Annotated[list[_FunctionDeclaration], Field(fail_fast=True)] | None = None


class _FunctionCallingConfig(_Object):
    """Whether and what the reply calls."""

    mode: str | None = None
    """`AUTO`, `NONE`, or `ANY` for one of the allowed functions."""
    allowed_function_names: Texts | None = None


class _ToolConfig(_Object):
    """How tools are used."""

    function_calling_config: _FunctionCallingConfig | None = None


class _ThinkingConfig(_Object):
    """How the reply reasons."""

    include_thoughts: bool | None = None
    """Whether the answer has the reasoning as parts; its signatures have it in any case."""
    thinking_budget: int | None = None
    """0 for not at all; a number closes the reasoning after so many ids of the reply, -1 never."""
    thinking_level: str | None = None
    """The template's variable `reasoning_effort`, if it reads it."""


class GenerationConfig(_Object):
    """How to sample."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, BeforeValidator(_as_integer)] = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    """A maximum: if it exceeds the context, or without it, what fits."""
    stop_sequences: Texts | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: str | None = None
    """`text/plain`, or `application/json`, with a schema or without."""
    response_schema: dict[str, Any] | None = None
    """In Google's form."""
    response_json_schema: dict[str, Any] | None = None
    thinking_config: _ThinkingConfig | None = None


class ContentsBody(_Object):
    """A conversation to answer."""

    model: str | None = None
    """As in the path, which has it."""
    contents: Annotated[list[Content], Field(fail_fast=True), BeforeValidator(_as_list)]
    system_instruction: Content | None = None
    tools: Annotated[list[_ToolGroup], Field(fail_fast=True), BeforeValidator(_as_list)] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, such as `enable_thinking`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor for all images, such as `max_pixels`."""

    def at_path(self, model: str) -> ContentsBody:
        """The body with the model of its path. Raises `HttpError` if it names another one itself."""
        if self.model is not None and self.model.removeprefix("models/") != model:
            raise HttpError(
                400, f"model must be the one in the path, {shorten(model)}, got {shorten(self.model)}", param="model"
            )
        return self.model_copy(update={"model": model})

    @property
    def config(self) -> GenerationConfig:
        """How to sample."""
        return self.generation_config or GenerationConfig()

    @property
    def thinking(self) -> _ThinkingConfig:
        """How to reason."""
        return self.config.thinking_config or _ThinkingConfig()

    @property
    def calling(self) -> _FunctionCallingConfig:
        """Whether and what to call."""
        return (self.tool_config or _ToolConfig()).function_calling_config or _FunctionCallingConfig()

    def check_supported(self) -> list[str]:
        """The names of fields that are ignored. Raises `HttpError` for what this server does not support."""
        ignored = GEMINI.check(self.model_extra)
        ignored += GEMINI_CONFIG.check(self.config.model_extra, place="generationConfig")
        ignored += GEMINI_CONFIG.check(self.thinking.model_extra, place="generationConfig.thinkingConfig")
        ignored += GEMINI_TOOLS.check((self.tool_config or _ToolConfig()).model_extra, place="toolConfig")
        ignored += GEMINI_TOOLS.check(self.calling.model_extra, place=_CALLING)
        for k, tool in enumerate(self.tools or ()):
            own_tools = dict.fromkeys(tool.model_extra or (), True)  # `{"googleSearch": {}}` asks for something
            ignored += GEMINI_TOOLS.check(own_tools, place=f"tools.{k}")
            for number, function in enumerate(tool.function_declarations or ()):
                place = f"tools.{k}.functionDeclarations.{number}"
                ignored += GEMINI_TOOLS.check(function.model_extra, place=place)
                _refuse_both(function.parameters, function.parameters_json_schema, f"{place}.parameters")
        return ignored

    def make_tools(self) -> list[ToolSchema]:
        """The tools in the OpenAI form."""
        return [
            make_tool(one.name, one.description, _choose_schema(one.parameters, one.parameters_json_schema) or _NOTHING)
            for tool in self.tools or ()
            for one in tool.function_declarations or ()
        ]

    def choose_tools(self, tools: list[ToolSchema]) -> ToolChoice:
        """What the reply may call. Raises `HttpError` for a choice that cannot be made."""
        mode, allowed = self.calling.mode or "AUTO", self.calling.allowed_function_names
        if mode not in ("AUTO", "MODE_UNSPECIFIED", "NONE", "ANY"):
            raise HttpError(
                400, f"{_CALLING}.mode must be 'AUTO', 'NONE' or 'ANY', got {shorten(mode)}", param=f"{_CALLING}.mode"
            )
        if mode == "ANY":
            return self._require_calls(tools)
        if allowed:
            raise HttpError(
                400,
                f"{_CALLING}.allowedFunctionNames must be left out with the mode {mode!r}: it is for 'ANY', where "
                "the model must call",
                param=f"{_CALLING}.allowedFunctionNames",
            )
        return ToolChoice(reads_calls=bool(tools) and mode != "NONE")

    def _require_calls(self, tools: list[ToolSchema]) -> ToolChoice:
        """The reply must call one of the tools, or of those that are allowed."""
        allowed = self.calling.allowed_function_names
        names = [get_name(tool) for tool in tools]
        if not tools or not set(allowed or ()) <= set(names):
            raise HttpError(
                400,
                f"{_CALLING} must match functions in tools ({shorten(names)}), got mode 'ANY' with "
                f"allowedFunctionNames={shorten(allowed)}",
                param=_CALLING,
            )
        required = [tool for tool in tools if not allowed or get_name(tool) in allowed]
        return ToolChoice(reads_calls=True, required_functions=required)

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint of `responseMimeType` and a schema."""
        config = self.config
        _refuse_both(config.response_schema, config.response_json_schema, "generationConfig.responseSchema")
        schema = _choose_schema(config.response_schema, config.response_json_schema)
        match config.response_mime_type:
            case None | "" | "text/plain" if schema is None:
                return None
            case "application/json":
                return StructuredOutput(json_schema=json.dumps(_ANY_JSON if schema is None else schema))
            case wanted:
                raise HttpError(
                    400,
                    "generationConfig.responseMimeType must be 'application/json', which is required with a schema, "
                    f"or 'text/plain', got {shorten(wanted)}",
                    param="generationConfig.responseMimeType",
                )

    @property
    def effort(self) -> str | None:
        """The wish how much to reason; "none" for not at all."""
        level = self.thinking.thinking_level
        if self.thinking.thinking_budget == 0:
            return "none"
        return None if level is None or level == "THINKING_LEVEL_UNSPECIFIED" else level.lower()

    @property
    def effort_field(self) -> str:
        """The field that `effort` is from."""
        is_budget = self.thinking.thinking_budget == 0
        return f"generationConfig.thinkingConfig.{'thinkingBudget' if is_budget else 'thinkingLevel'}"

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The field that bounds the reasoning, with its number of ids; -1 leaves it to the model."""
        number = self.thinking.thinking_budget or 0
        return ("generationConfig.thinkingConfig.thinkingBudget", number) if number > 0 else None

    @property
    def sampling(self) -> SamplingFields:
        """The sampling parameters."""
        config = self.config
        return SamplingFields(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            seed=config.seed,
            stop=config.stop_sequences,
        )


class CountBody(ContentsBody):
    """A conversation to count: by itself, or as the body that would be answered."""

    contents: Annotated[list[Content], Field(fail_fast=True), BeforeValidator(_as_list)] = Field(default_factory=list)
    generate_content_request: ContentsBody | None = None

    def choose(self) -> ContentsBody:
        """The conversation. Raises `HttpError` if there are two."""
        if self.generate_content_request is None:
            return self
        if self.contents:
            raise HttpError(
                400, "contents must be left out beside generateContentRequest, which has its own", param="contents"
            )
        return self.generate_content_request


def make_signature(reasoning: str) -> str:
    """The signature that brings a reasoning text back."""
    return base64.b64encode(make_seal(reasoning, packed=True).encode()).decode()


def read_conversation(body: ContentsBody) -> ConversationBuilder:
    """Translate a body's system instruction and contents.

    Raises:
        HttpError: a part is not allowed in its content, a response answers no call, or a signature does not fit.
        SamplingError: a part has a key that is not supported.
    """
    reader = _Reader()
    if body.system_instruction is not None:
        reader.conversation.check_extra(MESSAGE_KEYS, body.system_instruction.model_extra, "systemInstruction")
        reader.read_given("system", "systemInstruction", body.system_instruction)
    reply: list[tuple[str, ContentPart]] = []
    for k, content in enumerate(body.contents):
        reader.conversation.check_extra(MESSAGE_KEYS, content.model_extra, f"contents.{k}")
        parts = [(f"contents.{k}.parts.{number}", part) for number, part in enumerate(content.parts or ())]
        if content.role == "model":
            reply += parts
            if k + 1 == len(body.contents) or body.contents[k + 1].role != "model":
                reader.read_reply(reply)
                reply = []
        else:
            reader.read_given("user", f"contents.{k}", content)
    if body.contents and body.contents[-1].role == "model":
        raise HttpError(
            400,
            f"contents.{len(body.contents) - 1} must not be of the role 'model': this server does not continue the "
            "text of a reply (prefill)",
            param="contents",
        )
    return reader.conversation


class _Reader:
    """Reads contents, and knows which calls wait for a response."""

    def __init__(self) -> None:
        self.conversation = ConversationBuilder()
        self._open: list[ToolCall] = []
        """Calls of the last reply without a response."""

    def read_given(self, role: Literal["system", "user"], place: str, content: Content) -> None:
        """Read a content of the user's, or the instruction."""
        waiting: list[dict[str, Any]] = []
        if role == "user" and not content.parts:
            raise HttpError(400, f"{place}.parts must have at least one part, got none", param=f"{place}.parts")
        for k, part in enumerate(content.parts or ()):
            inner = f"{place}.parts.{k}"
            self._check_extra(inner, part)
            kind = part.get_kind(inner)
            if part.thought:
                raise refuse_misplaced(inner, "thought", role)
            if role == "user" and part.function_response is not None:
                self._add_message(role, waiting)
                waiting = []
                self._read_response(f"{inner}.functionResponse", part.function_response)
            else:
                waiting.append(self._make_given_part(inner, kind, part, role))
        self._add_message(role, waiting)

    def _make_given_part(self, place: str, kind: str, part: ContentPart, role: str) -> dict[str, Any]:
        """A text or an image in the OpenAI form; an instruction has texts only."""
        if kind == "text":
            return {"type": "text", "text": part.text or ""}
        if role == "user" and kind in ("inlineData", "fileData"):
            return self._make_image(place, part)
        raise refuse_misplaced(place, kind, role)

    def _add_message(self, role: str, parts: list[dict[str, Any]]) -> None:
        """Add the message that has these parts, if there are any."""
        if parts:
            message = {"role": role, "content": simplify_parts(parts)}
            self.conversation.messages.append(cast(Message, message))

    def read_reply(self, parts: Iterable[tuple[str, ContentPart]]) -> None:
        """Read all parts of one reply."""
        content, reasoning, thoughts, calls = "", "", "", list[ToolCall]()
        for place, part in parts:
            self._check_extra(place, part)
            kind = part.get_kind(place)
            if kind == "text" and part.thought:
                thoughts += part.text or ""
            elif kind == "text":
                content += part.text or ""
            elif part.function_call is not None:
                calls.append(self._read_call(f"{place}.functionCall", part.function_call, len(calls)))
            else:
                raise refuse_misplaced(place, kind, "model")
            if (sealed := _read_signature(place, part.thought_signature)) is not None:
                reasoning += _choose_reasoning(place, thoughts, sealed)
                thoughts = ""
        self.conversation.add_reply(content=content, reasoning=reasoning + thoughts, calls=calls)
        self._open = calls

    def _check_extra(self, place: str, given: _Object) -> None:
        self.conversation.check_extra(GEMINI_PARTS, given.model_extra, place)

    def _read_call(self, place: str, call: _CallPart, number: int) -> ToolCall:
        self._check_extra(place, call)
        # Clients may leave ids out. Ours have nine characters, which the strictest templates require.
        call_id = call.id or f"c{len(self.conversation.messages):05}{number:03}"
        return make_call(call_id, call.name, json.dumps(call.args or {}, ensure_ascii=False))

    def _read_response(self, place: str, response: _FunctionResult) -> None:
        self._check_extra(place, response)
        call_id = response.id or self._find_open_call(response.name)
        if call_id is None:
            raise HttpError(
                400,
                f"{place} must have the id of an earlier functionCall, or the name of one in the reply before that has "
                f"no response yet, got the name {shorten(response.name)}",
                param=place,
            )
        self.conversation.check_answers(call_id, place=f"{place}.id", call="functionCall")
        self._open = [call for call in self._open if call["id"] != call_id]
        given = response.response or {}
        parts = [{"type": "text", "text": _read_output(given)}]
        parts += [self._make_image(f"{place}.parts.{k}", part) for k, part in enumerate(response.parts or ())]
        message = {"role": "tool", "tool_call_id": call_id, "content": simplify_parts(parts)}
        if given.keys() == {"error"}:
            message["is_error"] = True
        self.conversation.messages.append(cast(Message, message))

    def _find_open_call(self, name: str | None) -> str | None:
        """The id of the first call of a function that has no response yet."""
        return next((call["id"] for call in self._open if call["function"]["name"] == name), None)

    def _make_image(self, place: str, part: ContentPart | _ResultImage) -> dict[str, Any]:
        blob, file = part.inline_data, part.file_data
        self._check_extra(place, part)
        name = "fileData" if blob is None else "inlineData"
        data = blob or file
        if data is None:
            raise HttpError(400, f"{place} must have inlineData or fileData", param=place)
        self._check_extra(f"{place}.{name}", data)
        if data.mime_type is not None and not data.mime_type.startswith("image/"):
            raise HttpError(
                400,
                f"{place}.{name}.mimeType must be an image's, got {shorten(data.mime_type)}",
                param=f"{place}.{name}.mimeType",
            )
        if isinstance(data, _Blob):
            url, field = f"data:{data.mime_type};base64,{data.data.translate(_STANDARD)}", "data"
        else:
            url, field = data.file_uri, "fileUri"
        return self.conversation.make_image_part(url, place=f"{place}.{name}.{field}")


def _read_output(response: Mapping[str, Any]) -> str:
    """The text of a function's response; `output` or `error` alone only wrap it."""
    if not response:
        return ""
    output: Any = response
    if response.keys() in ({"output"}, {"error"}):
        (output,) = response.values()
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _read_signature(place: str, signature: str | None) -> str | None:
    """The reasoning that a signature of ours brings back; None without one, and for those of other servers."""
    try:
        seal = base64.b64decode((signature or "").translate(_STANDARD), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    if not is_seal(seal):
        return None
    reasoning = unpack_seal(seal)
    if reasoning is None:
        raise HttpError(
            400,
            f"{place}.thoughtSignature must come back as this server wrote it, or be left out",
            param=f"{place}.thoughtSignature",
        )
    return reasoning


def _choose_reasoning(place: str, thoughts: str, sealed: str) -> str:
    """The thoughts up to a part, which end with what its signature has; or that, where the client dropped them."""
    if not thoughts.endswith(sealed):
        if thoughts:
            raise HttpError(
                400,
                f"{place}.thoughtSignature must fit the thoughts before it, which this server wrote: send both back as "
                "they came, or leave the thoughts out",
                param=f"{place}.thoughtSignature",
            )
        return sealed
    return thoughts


_NOTHING = {"type": "object", "properties": {}}
"""The parameters of a function that declares none."""
_ANY_JSON = {"anyOf": [{"type": "object"}, {"type": "array"}]}


def _refuse_both(schema: Any, json_schema: Any, place: str) -> None:
    if schema is not None and json_schema is not None:
        raise HttpError(400, f"{place} must be left out beside the JSON schema for the same", param=place)


def _choose_schema(schema: Mapping[str, Any] | None, json_schema: dict[str, Any] | None) -> dict[str, Any] | None:
    return json_schema if schema is None else _convert_schema(schema)


_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""Which are text where a SDK follows protobuf's rule for int64."""


def _convert_schema(schema: Any) -> Any:
    """A schema in Google's form as a JSON schema.

    {"type": "STRING", "nullable": true, "maxLength": "9"}     {"type": ["string", "null"], "maxLength": 9}
    {"type": "OBJECT", "properties": .., "propertyOrdering": ["b", "a"]}     the properties in this order
    """
    if not isinstance(schema, Mapping):
        return schema
    given = {to_camel(name) if "_" in name else name: value for name, value in schema.items()}
    order, nullable = given.pop("propertyOrdering", None), given.pop("nullable", False)
    if given.get("type") == "TYPE_UNSPECIFIED":
        del given["type"]
    made = {name: _convert_keyword(name, value) for name, value in given.items()}
    if isinstance(order, list) and isinstance(made.get("properties"), dict):
        made["properties"] = _order(made["properties"], order)
    return _allow_null(made) if nullable is True else made


def _order(properties: dict[str, Any], order: list[Any]) -> dict[str, Any]:
    """The properties that are named first, in this order; others keep theirs."""
    named = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
    return named | properties


def _convert_keyword(name: str, value: Any) -> Any:
    """The value of one keyword of a schema; those of another form are kept, for the engine to refuse."""
    match name, value:
        case "type", str():
            return value.lower()
        case (("properties" | "$defs" | "defs"), dict()):
            return {key: _convert_schema(one) for key, one in value.items()}
        case (("anyOf" | "oneOf" | "allOf" | "prefixItems"), list()):
            return [_convert_schema(one) for one in value]
        case (("items" | "additionalProperties"), dict()):
            return _convert_schema(value)
        case _, str() if name in _COUNTS and value.isdecimal():
            return int(value)
    return value


def _allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    null = {"type": "null"}
    if "enum" in schema or not isinstance(schema.get("type"), str):
        return {"anyOf": [schema, null]}
    return {**schema, "type": [schema["type"], "null"]}
