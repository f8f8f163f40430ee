r"""Chooses the parser of a renderer's completions: by name, or by the calls that the chat template renders.

The evidence is what a format reads back. Turns with calls are rendered by the template, with control tokens at their
places, and read with each format:

    {"content": "", "tool_calls": [probe_one({"text": .., "count": 3, ..})]}   must be read back the same, and so must
                                                                               text next to a call, and two calls
    probe_one({"text": "it's"}), reasoning, ..                                 the format that reads most of these is
                                                                               taken: not all templates can write them

A turn or call that the template refuses or leaves out says nothing. The template's source may describe how to call
(`CallFormat.hints`). That counts if the template renders no calls, or if no format reads back those that it renders,
and the one described finds their names: Llama's and ToolACE's templates write `[add(a=two, b=3r)]` in the history, and
ask for `[add(a="two", b=3)]`. A template that shows no known format is read without calls, except ChatML that renders
no calls: its models are asked to write the Hermes format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.errors import InvalidInputError, TemplateError
from unbroken.messages import Message, ToolSchema, make_call
from unbroken.rendering.base import ParsedResponse, PartKind, ToolCallStatus
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_CONTENT,
    PROBE_NAMES,
    PROBE_REASONING,
    PROBE_TOOLS,
    PROBE_USER,
    MessageFormat,
    ReasoningDelimiters,
)
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats import FORMATS, get_format
from unbroken.rendering.parsing.id_stream import CompletionTokens
from unbroken.rendering.parsing.parser import FormatParser, ResponseParser
from unbroken.rendering.parsing.response_template import RESPONSE_TEMPLATE, ResponseTemplateParser

_CHATML = "<|im_start|>"

_USUAL: dict[str, Any] = {
    "text": PROBE_ARGUMENT,
    "digits": "7",
    "count": 3,
    "ratio": 0.5,
    "flag": True,
    "items": ["a", "b"],
    "where": {"k": "v", "n": 1},
}
_UNUSUAL: tuple[dict[str, Any], ...] = (
    {"text": 'it\'s "so"'},
    {"text": "one\ntwo\\three"},
    {"text": "a < b & <i>c</i> </parameter>"},
    {"text": "Größe 今天"},
    {"text": ""},
    {"text": "\nline\n"},
    {"text": "  indented\n\n"},
    {"page": None},
    {"items": [], "where": {}},
    {"where": {"k": None, "m": {"x": [1, "it's", False]}}},
    {},
)
_SCHEMAS: dict[str, Any] = {
    "text": {"type": "string"},
    "digits": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "page": {"type": ["integer", "null"]},
    "items": {"type": "array"},
    "where": {"type": "object"},
}
_TOOLS: tuple[ToolSchema, ...] = tuple(
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": _SCHEMAS}},
    }
    for name in PROBE_NAMES
)
_MAX_EXAMPLE_CHARS = 120
_RESULT = "Xq7Result"
_PARTIAL_TAG = re.compile(r"[<\[][^\s<>\[\]]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserChoice:
    """The parser of a renderer."""

    parser: ResponseParser
    unread_calls: str = ""
    """What is wrong, if it does not read back the calls that the template renders; empty if it was named."""


def choose_parser(
    name: str | None,
    *,
    template: ChatTemplate,
    message_format: MessageFormat,
    source: str,
    response_template: Any,
    reasoning: ReasoningDelimiters | None,
    tokens: CompletionTokens,
) -> ParserChoice:
    """Choose a parser by name.

    Without a name, the first of these that exists:
    1. a format of ours that reads back the calls that the chat template renders; if it renders none, one that its
       source describes;
    2. the tokenizer's response template, which reads less of each turn, but is certain to be the right format;
    3. a format that the source describes and that finds the names of the calls that the template renders;
    4. the usual format of templates that show none.

    Raises:
        InvalidInputError: there is no such parser, or the tokenizer's response template is missing or broken.
    """
    probe = _ReadBackProbe(template, message_format, tokens, reasoning)
    unread_calls = ""
    if name == RESPONSE_TEMPLATE and response_template is None:
        raise InvalidInputError(
            f"parser={RESPONSE_TEMPLATE!r} needs a tokenizer with a response_template: set it, or name a format"
        )
    if name is None:
        call_format, unread_calls = _detect_format(probe, source, has_response_template=response_template is not None)
    else:
        call_format = None if name == RESPONSE_TEMPLATE else get_format(name)
    if call_format is None:
        return ParserChoice(parser=ResponseTemplateParser(response_template, tokens))
    call_format = probe.adapt(call_format)
    if reasoning is not None:
        call_format = call_format.with_reasoning(reasoning.opening, reasoning.closing)
    return ParserChoice(parser=FormatParser(call_format, tokens), unread_calls=unread_calls)


def _detect_format(probe: _ReadBackProbe, source: str, *, has_response_template: bool) -> tuple[CallFormat | None, str]:
    """The format by the steps of `choose_parser`, and `unread_calls`; None for the response template."""
    described = [known for known in FORMATS if known.hints and all(hint in source for hint in known.hints)]
    call_format = probe.find_best(FORMATS) if probe.renders_calls else next(iter(described), None)
    if call_format is not None or has_response_template:
        return call_format, ""
    if not probe.renders_calls:
        return get_format("hermes" if _CHATML in source else "none"), ""
    call_format = probe.find_by_names(described)
    return call_format or get_format("none"), _describe_unread_calls(probe.example, call_format)


def _describe_unread_calls(example: str, described: CallFormat | None) -> str:
    written = f"the chat template renders calls that no format reads back, such as {example!r}"
    if described is None:
        return (
            f"{written}: a model's calls are part of its text, and no tool is run. Name the format that the model "
            "writes (parser), or use a template that renders the calls so that they can be read"
        )
    return (
        f"{written}: a model's calls are read in the format {described.name!r}, which the template describes, but a "
        "history that is rendered again shows other arguments than it wrote. Use a template that renders the calls so "
        "that they can be read"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A way to render a turn."""

    call_id: str = "callprob{}"
    is_answered: bool = False
    """The results of its calls follow it."""


_SETTINGS = (_Setting(), _Setting(call_id="functions.{name}:{}"), _Setting(is_answered=True))
"""Templates such as Kimi K2's write a call's name only as part of its id, and others the last turn in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedTurn:
    """A turn of the assistant, and its text as the model would sample it."""

    turn: Message
    prompt: str
    completion: str
    is_required: bool


_ARGUMENT = re.compile(rf"(\s*){PROBE_ARGUMENT}(\s*)")


class _ReadBackProbe:
    """The turns with calls of one template."""

    def __init__(
        self,
        template: ChatTemplate,
        message_format: MessageFormat,
        tokens: CompletionTokens,
        reasoning: ReasoningDelimiters | None,
    ) -> None:
        self._template = template
        self._message_format = message_format
        self._reasoning = reasoning
        self._codec = _TextCodec(tokens.control)
        self._tokens = CompletionTokens(
            tokens.control, self._codec.decode, stop_token_ids=tuple(tokens.stops), num_stop_ids=tokens.num_stop_ids
        )
        self._turns: dict[_Setting, list[_RenderedTurn]] = {}
        self._counts: dict[tuple[CallFormat, _Setting], int] = {}

    @property
    def renders_calls(self) -> bool:
        """Whether the template renders a turn with a call."""
        return any(self._get_turns(setting) for setting in _SETTINGS)

    def find_best(self, formats: Sequence[CallFormat]) -> CallFormat | None:
        """Find the format that reads all required turns, and the most of the others; the first of several."""
        for setting in _SETTINGS:
            counts = {known.name: self._count_read(known, setting) for known in formats}
            best = max(formats, key=lambda known: counts[known.name])
            if counts[best.name]:
                return best
        return None

    def find_by_names(self, formats: Sequence[CallFormat]) -> CallFormat | None:
        """Find the first format that sees a call of the right name in all required turns, whatever its arguments."""
        for setting in _SETTINGS:
            turns = [turn for turn in self._get_turns(setting) if turn.is_required]
            found = (known for known in formats if turns and all(self._finds_name(known, turn) for turn in turns))
            if (first := next(found, None)) is not None:
                return first
        return None

    @property
    def example(self) -> str:
        """The beginning of a turn with a call, as the template renders it."""
        turn = next(turn for setting in _SETTINGS for turn in self._get_turns(setting))
        text = self._codec.decode(self._cut_at_stop(self._codec.encode(turn.completion))).strip()
        return text if len(text) <= _MAX_EXAMPLE_CHARS else f"{text[:_MAX_EXAMPLE_CHARS]}.."

    def _finds_name(self, call_format: CallFormat, turn: _RenderedTurn) -> bool:
        calls = self._parse(self._make_parser(call_format), turn).tool_calls
        return bool(calls) and calls[0].name == turn.turn["tool_calls"][0]["function"]["name"]

    def adapt(self, call_format: CallFormat) -> CallFormat:
        """Adapt a format to what the template writes around values, if it then reads back the template's calls."""
        for setting in _SETTINGS:
            if self._count_read(call_format, setting):
                return _with_value_ends(call_format, self._get_turns(setting)[0])
        return call_format

    def _make_parser(self, call_format: CallFormat) -> FormatParser:
        if self._reasoning is not None:
            call_format = call_format.with_reasoning(self._reasoning.opening, self._reasoning.closing)
        return FormatParser(call_format, self._tokens)

    def _count_read(self, call_format: CallFormat, setting: _Setting) -> int:
        """The number of turns that the format reads back; 0 if a required one is not among them."""
        if (call_format, setting) not in self._counts:
            self._counts[call_format, setting] = self._count_in(self._get_turns(setting), call_format)
        return self._counts[call_format, setting]

    def _count_in(self, turns: Sequence[_RenderedTurn], call_format: CallFormat) -> int:
        if not turns or not _may_open(call_format, turns[0].completion):
            return 0
        parser = self._make_parser(_with_value_ends(call_format, turns[0]))
        num_read = 0
        for turn in turns:
            is_read = self._reads(parser, turn)
            if turn.is_required and not is_read:
                return 0
            num_read += is_read
        return num_read

    def _reads(self, parser: FormatParser, turn: _RenderedTurn) -> bool:
        parsed = self._parse(parser, turn)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.turn["tool_calls"]]
        read = [(call.name, call.arguments) if call.status is ToolCallStatus.OK else None for call in parsed.tool_calls]
        return read == calls and _has_texts(parsed, turn)

    def _parse(self, parser: FormatParser, turn: _RenderedTurn) -> ParsedResponse:
        return parser.parse(
            self._cut_at_stop(self._codec.encode(turn.completion)),
            reasoning_opened=parser.opens_reasoning(turn.prompt),
            tools=_TOOLS,
        )

    def _cut_at_stop(self, token_ids: list[int]) -> list[int]:
        """Without what the template writes behind the last stop id."""
        ends = [k for k, token_id in enumerate(token_ids) if token_id in self._tokens.stops]
        return token_ids[: ends[-1] + 1] if ends else token_ids

    def _get_turns(self, setting: _Setting) -> list[_RenderedTurn]:
        if setting not in self._turns:
            self._turns[setting] = list(self._render_turns(setting))
        return self._turns[setting]

    def _render_turns(self, setting: _Setting) -> Iterator[_RenderedTurn]:
        if not self._message_format.renders_calls:
            return
        prompt = self._render([], add_generation_prompt=True)
        for turn, is_required in _make_turns(setting.call_id, self._message_format.reasoning_key is not None):
            results = _make_results(turn) if setting.is_answered else []
            whole = self._render([turn, *results], add_generation_prompt=False)
            if whole is None or prompt is None:
                continue
            whole = whole.partition(_RESULT)[0]
            start = self._find_common(prompt, whole)
            completion = whole[start:]
            if all(call["function"]["name"] in completion for call in turn["tool_calls"]):
                yield _RenderedTurn(turn=turn, prompt=whole[:start], completion=completion, is_required=is_required)

    def _find_common(self, prompt: str, whole: str) -> int:
        """The length of their common beginning, which ends with no part of a control token or tag."""
        pairs = enumerate(zip(prompt, whole, strict=False))
        stop = next((k for k, (a, b) in pairs if a != b), min(len(prompt), len(whole)))
        found = (match for text in (prompt, whole) for match in self._tokens.control.find(text))
        stop = min([stop, *(match.start for match in found if match.start < stop < match.stop)])
        partial = _PARTIAL_TAG.search(whole, 0, stop)
        return stop if partial is None else partial.start()

    def _render(self, turns: Sequence[Message], *, add_generation_prompt: bool) -> str | None:
        user: Message = {"role": "user", "content": PROBE_USER}
        try:
            return self._template.render(
                self._message_format.convert([user, *turns]),
                tools=PROBE_TOOLS,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError:
            return None


def _with_value_ends(call_format: CallFormat, turn: _RenderedTurn) -> CallFormat:
    found = _ARGUMENT.search(turn.completion)
    return call_format if found is None else replace(call_format, value_ends=(found[1], found[2]))


class _TextCodec:
    """Ids for texts: control tokens have their own, and each text between two of them has an id below 0."""

    def __init__(self, control: AddedTokens) -> None:
        self._control = control
        self._texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._control.find(text):
            ids += self._add(text[position : match.start])
            token_id = self._control.get_id(match.token)
            assert token_id is not None
            ids.append(token_id)
            position = match.stop
        return [*ids, *self._add(text[position:])]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[-1 - i] if i < 0 else self._control.get_text(i) or "" for i in token_ids)

    def _add(self, text: str) -> list[int]:
        if not text:
            return []
        self._texts.append(text)
        return [-len(self._texts)]


def _make_turns(call_id: str, with_reasoning: bool) -> Iterator[tuple[Message, bool]]:
    """The turns, and whether each must be read back."""
    one, two = PROBE_NAMES
    yield _make_turn(call_id, "", {one: _USUAL}), True
    yield _make_turn(call_id, PROBE_CONTENT, {one: _USUAL}), False
    yield _make_turn(call_id, "", {one: _USUAL, two: {"text": PROBE_ARGUMENT}}), True
    if with_reasoning:
        for content in ("", PROBE_CONTENT):
            turn = _make_turn(call_id, content, {one: _USUAL})
            yield {**turn, "reasoning_content": PROBE_REASONING}, False
    for arguments in _UNUSUAL:
        yield _make_turn(call_id, "", {one: arguments}), False


def _make_turn(call_id: str, content: str, calls: dict[str, dict[str, Any]]) -> Message:
    tool_calls = [
        make_call(call_id.format(k, name=name), name, arguments) for k, (name, arguments) in enumerate(calls.items())
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _make_results(turn: Message) -> list[Message]:
    return [
        {"role": "tool", "content": _RESULT, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in turn["tool_calls"]
    ]


def _may_open(call_format: CallFormat, completion: str) -> bool:
    """Whether a region of calls may open in this text: a quick test before it is read."""
    for region in call_format.regions:
        if region.kind is not PartKind.TOOL_CALL:
            continue
        beginnings = [text for text in (region.opening, region.starts_with) if text]
        if not beginnings and call_format.header is not None:
            beginnings = list(call_format.header.closings)
        if any(text in completion for text in beginnings):
            return True
    return False


def _has_texts(parsed: ParsedResponse, turn: _RenderedTurn) -> bool:
    """Whether text and reasoning that were rendered are read as that; some templates write text as reasoning."""
    reasoning, content = (text in turn.completion for text in (PROBE_REASONING, PROBE_CONTENT))
    if reasoning and (PROBE_REASONING not in parsed.reasoning or PROBE_REASONING in parsed.content):
        return False
    if content and PROBE_CONTENT not in f"{parsed.reasoning}\n{parsed.content}":
        return False
    return not any(name in parsed.content for name in PROBE_NAMES)
