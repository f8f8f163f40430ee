r"""Parses with transformers' response templates: a tokenizer's own description of how its model writes a turn.

    {"start_anchor": "<|im_start|>assistant\n",
     "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                               "transform": {"type": "function", "function": "{content}"}},
                "content": {"close": "<|im_end|>"}}}

    add them</think>It is 3.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>
    `-------´        `----´ `----------------- one call ---------------------------´
    reasoning        content                              (the prompt ended with `<think>`)

transformers loads and checks the description and reads the body of each field. The fields are found here, by the same
rules, because the parser of transformers returns no positions, raises for the whole turn if one call is broken, accepts
delimiters that the model only spells, and keeps only the last of two pieces of content. Here each call has its span and
status, control tokens count by id, and pieces are joined by newlines. The completion is read at its end, because the
patterns may look ahead.

It is chosen if `choose_parser` finds no format of ours for the chat template. Our formats read more: ids of calls,
calls and reasoning that were cut, deltas while the model samples. `parser="response_template"` chooses it always.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.messages import ToolSchema
from unbroken.rendering.base import BufferedReader, ParsedResponse, ParsedToolCall, PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt
from unbroken.rendering.parsing.id_stream import CompletionTokens, Delimiters, IdStream, PartBuilder
from unbroken.rendering.parsing.syntax.arguments import convert_arguments
from unbroken.rendering.parsing.syntax.json_calls import read_named_call

RESPONSE_TEMPLATE = "response_template"

_KINDS = {
    "content": PartKind.CONTENT,
    "reasoning_content": PartKind.REASONING,
    "reasoning": PartKind.REASONING,
    "thinking": PartKind.REASONING,
    "tool_calls": PartKind.TOOL_CALL,
}
"""By the name of a field; the text of other fields is markup."""
_MASK = "\ufffc"
_TYPED_BY_TEXT = ("xml-inline", "kv-lines")
_TRANSFORMERS_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Raised by transformers for a body that does not match its field."""
_SEARCH_TIMEOUT_S = 1.0
"""The patterns come from a tokenizer's files and may be slow."""


class ResponseTemplateParser:
    """Implements `ResponseParser` for a tokenizer's `response_template`."""

    def __init__(self, response_template: Any, tokens: CompletionTokens) -> None:
        """Load the description. Raises `InvalidInputError` if transformers refuses it."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec: Any = load_response_template(response_template)
        except _TRANSFORMERS_ERRORS as error:
            raise InvalidInputError(
                f"transformers does not accept tokenizer.response_template: {error}. Correct it, set it to None, or "
                "name a format as parser="
            ) from None
        self._tokens = tokens
        self._delimiters = Delimiters(tokens.control.texts, control=tokens.control)

    @property
    def name(self) -> str:
        """`response_template`."""
        return RESPONSE_TEMPLATE

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text ends inside reasoning."""
        anchors = list(self._spec.start_anchor_re.finditer(prompt_end))
        if not anchors:
            return False
        fields = list(_find_fields(self._spec, prompt_end[anchors[-1].end() :]))
        return bool(fields) and not fields[-1].is_closed and _KINDS.get(fields[-1].name) is PartKind.REASONING

    def open_reader(
        self, *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> BufferedReader:
        """Open a reader for one completion, which returns everything at its end."""
        return BufferedReader(
            lambda ids: self.parse(ids, reasoning_opened=reasoning_opened, tools=tools, reads_calls=reads_calls)
        )

    def parse(
        self,
        completion_ids: Iterable[int],
        *,
        reasoning_opened: bool = False,
        tools: Sequence[ToolSchema] = (),
        reads_calls: bool = True,
    ) -> ParsedResponse:
        """Read a whole completion; see `ResponseParser`."""
        stream = IdStream(self._tokens, self._delimiters)
        pieces = [*stream.feed(completion_ids), *stream.close()]
        stops = stream.stop_texts
        text = "".join(piece.text for piece in pieces)
        # Delimiters that the model spelled with ordinary ids are hidden from the search, but not from the values.
        visible = "".join(piece.text if piece.is_delimiter else self._mask(piece.text) for piece in pieces)
        reasoning = next((name for name in self._spec.fields if _KINDS.get(name) is PartKind.REASONING), None)
        fields = _find_fields(self._spec, visible + "".join(stops), first=reasoning if reasoning_opened else None)
        turn = _TurnBuilder(self._spec, text, stream.parts, tools, reads_calls=reads_calls)
        for found in fields:
            turn.add(found)
        return turn.finish(num_stop=len(stops))

    def _mask(self, text: str) -> str:
        for match in self._tokens.control.find(text):
            text = text[: match.start] + _MASK * (match.stop - match.start) + text[match.stop :]
        return text


class _TurnBuilder:
    def __init__(
        self, spec: Any, text: str, parts: PartBuilder, tools: Sequence[ToolSchema], *, reads_calls: bool
    ) -> None:
        self._spec = spec
        self._text = text
        self._parts = parts
        self._tools = tools
        self._reads_calls = reads_calls
        self._pieces: dict[PartKind, list[str]] = {PartKind.CONTENT: [], PartKind.REASONING: []}
        self._calls: list[ParsedToolCall] = []
        self._is_reasoning_open = False
        self._parts.begin(PartKind.MARKUP, 0)

    def add(self, found: _FieldSpan) -> None:
        """Add one field. The ids of the stop belong to no field."""
        start, stop = (min(position, len(self._text)) for position in found.body)
        kind = _KINDS.get(found.name, PartKind.MARKUP)
        if kind is PartKind.TOOL_CALL:
            add = self._add_calls if self._reads_calls else self._add_as_content
            add(found, self._text[start:stop])
            return
        if stop > start:
            self._parts.begin(kind, start)
            self._parts.begin(PartKind.MARKUP, stop)
        if kind in self._pieces:
            text = self._read_value(found, self._text[start:stop])
            self._pieces[kind] += [text] if text else []
        if kind is PartKind.REASONING and not found.is_closed:
            self._is_reasoning_open = True
            self._add_unread_call(start, stop)

    def finish(self, *, num_stop: int) -> ParsedResponse:
        return ParsedResponse(
            content=self._join(PartKind.CONTENT),
            reasoning=self._join(PartKind.REASONING),
            tool_calls=tuple(self._calls),
            reasoning_complete=not self._is_reasoning_open,
            parts=self._parts.finish(num_stop=num_stop),
        )

    def _join(self, kind: PartKind) -> str:
        joins = [field.join for name, field in self._spec.fields.items() if _KINDS.get(name) is kind]
        return next((text for text in joins if text is not None), "\n").join(self._pieces[kind])

    def _read_value(self, found: _FieldSpan, body: str) -> str:
        from transformers.utils.chat_parsing.content_parsers import process_field

        try:
            value = process_field(body, self._spec.fields[found.name], found.captures)
        except _TRANSFORMERS_ERRORS:
            value = body
        return value if isinstance(value, str) else body

    def _add_calls(self, found: _FieldSpan, body: str) -> None:
        start, stop = (min(position, len(self._text)) for position in found.whole)
        span = (self._parts.begin(PartKind.TOOL_CALL, start), self._parts.begin(PartKind.MARKUP, stop))
        field = self._spec.fields[found.name]
        attempts = [CallAttempt(status=ToolCallStatus.UNCLOSED)]
        if found.is_closed:
            attempts = _read_attempts(field, body, found.captures, self._tools)
        full_text = self._text[start:stop]
        self._calls += [attempt.to_call(body, span, full_text=full_text) for attempt in attempts]

    def _add_unread_call(self, start: int, stop: int) -> None:
        """Report a call that stays in reasoning: transformers ends the reasoning only at its closing."""
        names = [name for name in self._spec.fields if _KINDS.get(name) is PartKind.TOOL_CALL]
        openings = [self._spec.fields[name].open_re for name in names if self._reads_calls]
        body = self._text[start:stop]
        found = [match.start() for opening in openings if opening and (match := _search(opening, body, 0))]
        if found:
            span = (self._parts.num_ids, self._parts.num_ids)
            self._calls.append(CallAttempt(status=ToolCallStatus.IN_REASONING).to_call(body[min(found) :], span))

    def _add_as_content(self, found: _FieldSpan, body: str) -> None:
        start, stop = (min(position, len(self._text)) for position in found.whole)
        self._parts.begin(PartKind.CONTENT, start)
        self._parts.begin(PartKind.MARKUP, stop)
        self._pieces[PartKind.CONTENT].append(self._text[start:stop])


def _read_attempts(field: Any, body: str, captures: dict[str, str], tools: Sequence[ToolSchema]) -> list[CallAttempt]:
    from transformers.utils.chat_parsing.content_parsers import process_field

    is_text = field.content in _TYPED_BY_TEXT
    try:
        value = process_field(body, field, captures)
    except _TRANSFORMERS_ERRORS:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX if is_text else ToolCallStatus.INVALID_JSON)]
    values = value if isinstance(value, list) else [value]
    return [_read_attempt(item, tools, is_text=is_text) for item in values] or [
        CallAttempt(status=ToolCallStatus.MISSING_NAME)
    ]


def _get_name(function: Any) -> str:
    """The name of a function that a model wrote as JSON; empty if it has none."""
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _read_attempt(value: Any, tools: Sequence[ToolSchema], *, is_text: bool) -> CallAttempt:
    value = value if isinstance(value, dict) else {}
    function = value.get("function", value)
    if not (name := _get_name(function)):
        return CallAttempt(status=ToolCallStatus.MISSING_NAME)
    arguments = function.get("arguments")
    if "arguments" not in function and function.keys() - {"name", "id", "type"}:
        return CallAttempt(status=ToolCallStatus.INVALID_ARGUMENTS, name=name)  # they may be under another key
    try:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (ValueError, TypeError, RecursionError):
        return CallAttempt(status=ToolCallStatus.INVALID_JSON, name=name)
    call_id = value.get("id")
    call = read_named_call(name, arguments, call_id=call_id if isinstance(call_id, str) else "")
    return _convert_texts(call, tools) if is_text and call.status is ToolCallStatus.OK else call


def _convert_texts(call: CallAttempt, tools: Sequence[ToolSchema]) -> CallAttempt:
    """The call with the types that its tool's schema gives to arguments that were written as text."""
    texts = {key: text for key, text in call.arguments.items() if isinstance(text, str)}
    return replace(call, arguments={**call.arguments, **convert_arguments(texts, call.name, tools)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _FieldSpan:
    """One field in a text; pairs are half-open ranges of characters."""

    name: str
    whole: tuple[int, int]
    """With its delimiters."""
    body: tuple[int, int]
    is_closed: bool
    captures: dict[str, str] = field(default_factory=dict)
    """The named groups of its opening's match."""


def _find_fields(spec: Any, text: str, *, first: str | None = None) -> Iterator[_FieldSpan]:
    """Find all fields, from left to right; the text begins inside the field `first`.

    The rules are those of transformers: in a field with an opening only its closing counts. Elsewhere (in the field
    without an opening, if there is one) the opening that begins first counts, and of several there the longest. `spec`
    is a `ResponseTemplate` of transformers.
    """
    current = first or spec.implicit
    captures: dict[str, str] = {}
    whole_start = position = 0
    while True:
        name, match = _find_next(spec, text, position, current)
        start, stop = (len(text), len(text)) if match is None else match.span()
        is_opening = match is None or name != current
        # Nothing between two fields is no field without an opening; an empty field between delimiters is one.
        if current is not None and (start > position or current != spec.implicit):
            yield _FieldSpan(
                name=current,
                whole=(whole_start, start if is_opening else stop),
                body=(position, start),
                is_closed=not is_opening or current == spec.implicit,
                captures=captures,
            )
        if match is None:
            return
        if stop == position and not is_opening:
            return  # an empty closing of an empty field: transformers stops here too
        current, captures = (name, _get_captures(match)) if is_opening else (spec.implicit, {})
        whole_start, position = start, stop


def _get_captures(match: Any) -> dict[str, str]:
    return {key: value for key, value in match.groupdict().items() if value is not None}


def _find_next(spec: Any, text: str, position: int, current: str | None) -> tuple[str | None, Any]:
    """Find the next delimiter, with the field that it opens, or the current field if it closes that."""
    if current is not None and current != spec.implicit:
        closing = spec.fields[current].close_re
        return current, None if closing is None else _search(closing, text, position)
    found = []
    for name, known in spec.fields.items():
        if known.open_re is not None and (match := _search(known.open_re, text, position)) is not None:
            found.append((match.start(), -len(match.group()), 0, name, match))
        if name == spec.implicit and known.close_re is not None:
            match = _search(known.close_re, text, position)
            if match is not None:
                found.append((match.start(), -len(match.group()), 1, name, match))
    if not found:
        return None, None
    *_, name, match = min(found, key=lambda candidate: candidate[:4])
    return name, match


def _search(pattern: Any, text: str, position: int) -> Any:
    try:
        return pattern.search(text, position, timeout=_SEARCH_TIMEOUT_S)
    except TimeoutError:
        return None
