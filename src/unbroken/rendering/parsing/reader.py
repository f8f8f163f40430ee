"""The one reader of completions: whole or id by id, for any call format.

It cuts the text at the format's delimiters, and follows the format from region to region. It holds back white space
that may be trimmed and the body of a call, and its stream (`IdStream`) what may become a delimiter or end the turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from unbroken.errors import InvariantError
from unbroken.messages import ToolSchema
from unbroken.rendering.base import Delta, ParsedResponse, ParsedToolCall, PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, InnerDelimiter, Region
from unbroken.rendering.parsing.id_stream import IdStream, PartBuilder, TextPiece
from unbroken.rendering.parsing.syntax.arguments import list_names

_MAX_CHARS_BEHIND_TEXT = 200_000
"""Each bracket in a text may begin a call that ends it: they are tried up to this many characters in all."""


class FormatReader:
    """Implements `ResponseReader` for one completion."""

    def __init__(
        self,
        call_format: CallFormat,
        stream: IdStream,
        *,
        exact: Collection[str],
        reasoning_opened: bool,
        tools: Sequence[ToolSchema],
    ) -> None:
        """`exact` are the delimiters that control ids make, see `Delimiters.exact`."""
        self._call_format = call_format
        self._openings = {region.opening: region for region in call_format.regions if region.opening}
        self._start_regions = [region for region in call_format.regions if region.starts_with]
        self._separators = {*call_format.separators, *call_format.message_separators}
        self._call_openings = {
            opening for opening, region in self._openings.items() if region.kind is PartKind.TOOL_CALL
        }
        self._exact_beginnings = (self._call_openings | self._separators).intersection(exact)
        self._stream = stream
        self._parts = stream.parts
        self._tools = tools
        self._lead = ""  # text that may begin a region by its `starts_with`
        self._lead_start = 0
        self._delimiter_stop = 0
        self._content = _TextJoiner()
        self._reasoning = _TextJoiner()
        self._calls: list[ParsedToolCall] = []
        self._deltas: list[Delta] = []
        self._region: Region | None = None
        self._body: _OpenBody | None = None
        self._held_call: _HeldCall | None = None
        self._unread_calls: list[list[str]] = []  # of the reasoning that is being read: pieces from an opening on
        self._late_closings: Sequence[str] = ()  # of reasoning that a call has ended
        self._was_once_opened = False
        self._response: ParsedResponse | None = None
        self._parts.begin(PartKind.CONTENT, 0)
        if reasoning_opened and call_format.reasoning is not None:
            self._enter(call_format.reasoning, opened_at=0, start=0)
        elif self._reads_headers or (call_format.header is not None and call_format.header.is_opened_by_prompt):
            self._open_header(0, 0)

    def feed(self, token_ids: Iterable[int]) -> tuple[Delta, ...]:
        """Take more ids and return what is certain now."""
        if self._response is not None:
            raise InvariantError("the response was closed: open another reader for another completion")
        self._follow(self._stream.feed(token_ids))
        return self._take_deltas()

    def close(self) -> tuple[Delta, ...]:
        """End the completion and return what was held back."""
        if self._response is None:
            self._follow(self._stream.close())
            is_complete = self._end()
            self._report_calls_behind_text()
            self._response = ParsedResponse(
                content=self._content.text,
                reasoning=self._reasoning.text,
                tool_calls=tuple(self._calls),
                reasoning_complete=is_complete,
                parts=self._parts.finish(num_stop=len(self._stream.stop_texts)),
            )
        return self._take_deltas()

    def finish(self) -> ParsedResponse:
        """Close the reader if needed, and return the whole response."""
        self.close()
        assert self._response is not None
        return self._response

    def _take_deltas(self) -> tuple[Delta, ...]:
        """The deltas since the last call, with neighbours of the same kind joined."""
        deltas, self._deltas = self._deltas, []
        joined: list[Delta] = []
        texts: list[str] = []
        for k, delta in enumerate(deltas):
            if delta.tool_call is not None:
                joined.append(delta)
                continue
            texts.append(delta.text)
            if k + 1 == len(deltas) or deltas[k + 1].kind is not delta.kind:
                joined.append(Delta(kind=delta.kind, text="".join(texts)))
                texts = []
        return tuple(joined)

    # From region to region

    @property
    def _reads_headers(self) -> bool:
        """Whether everything outside a region is a header."""
        return self._call_format.header is not None and not self._call_format.header.opening

    def _follow(self, pieces: Iterable[TextPiece]) -> None:
        for piece in pieces:
            if piece.is_delimiter:
                self._delimiter_stop = piece.stop
            if self._region is None:
                self._follow_outside(piece)
            else:
                self._follow_inside(piece, self._region)

    def _follow_outside(self, piece: TextPiece) -> None:
        if self._body is not None:
            self._follow_header(piece, self._body)
        elif not piece.is_delimiter or not self._open(piece.text, piece.start, piece.stop):
            self._add_content(piece.text, piece.start)

    def _open(self, delimiter: str, start: int, stop: int) -> bool:
        """Handle a delimiter outside of regions. False if it has no meaning there."""
        region = self._openings.get(delimiter)
        if region is not None and not (region.once and (self._was_once_opened or self._calls)):
            self._release_lead()
            self._enter(region, opened_at=start, start=stop, opening=delimiter)
        elif self._call_format.header is not None and delimiter == self._call_format.header.opening:
            self._release_lead()
            self._open_header(start, stop, opening=delimiter)
        elif delimiter in self._late_closings:
            # Qwen3 and GLM also write `<think>hm<tool_call>..</tool_call></think>ok`: the call has ended the reasoning.
            self._late_closings = ()
            self._release_lead()
            self._cut(self._content, start)
        elif delimiter in self._separators or self._is_empty_reasoning(delimiter):
            self._release_lead()
            self._cut(self._content, start)
        else:
            return False
        return True

    def _follow_inside(self, piece: TextPiece, region: Region) -> None:
        if region.kind is PartKind.REASONING and self._follow_held_call(piece, region):
            return
        if self._body is not None and region.quotes is not None and self._body.quotes(piece, region.quotes):
            self._body.add(piece, region.inner_delimiters)
        elif piece.is_one_of(region.closings):
            self._leave(region, piece.start, piece.stop, is_closed=True, closing=piece.text)
        elif piece.is_one_of(region.ended_by) or (not region.closings and piece.is_one_of(self._late_closings)):
            self._leave(region, piece.start, piece.start, is_closed=not region.closings)
            self._follow_outside(piece)
        elif self._body is not None:
            self._body.add(piece, region.inner_delimiters)
        elif region.kind is PartKind.REASONING:
            self._add_reasoning(piece)
        else:
            self._add_text(self._content, region.kind, piece.text, piece.start)

    # Calls inside reasoning

    def _follow_held_call(self, piece: TextPiece, thought: Region) -> bool:
        """Hold back what may be a call in reasoning that the model forgot to close; False if the piece is not of one.

            <think> hm <tool_call> {"name": "now", "arguments": {}} </tool_call>     a call: it ends the reasoning
            <think> the tag <tool_call> begins a call </think>                       text: it is still reasoning

        It is a call if control ids open it and its body is read as one.
        """
        held = self._held_call
        begins_call = piece.is_one_of(self._exact_beginnings)
        ends_reasoning = piece.is_one_of(thought.closings) or piece.is_one_of(thought.ended_by)
        if held is None:
            if ends_reasoning or not begins_call:
                return False
            held = self._held_call = _HeldCall()
        elif ends_reasoning:
            return self._end_reasoning_in_call(held, thought, piece)
        if held.region is not None and held.body is not None:
            self._follow_held_body(held, held.region, held.body, piece, thought)
        elif begins_call:
            held.open(piece, self._openings.get(piece.text))
        elif not piece.text.strip():
            held.pieces.append(piece)  # white space between the beginnings of a section and of a call
        else:
            self._release_held_call(held)
            self._add_reasoning(piece)
        return True

    def _end_reasoning_in_call(self, held: _HeldCall, thought: Region, piece: TextPiece) -> bool:
        """End the reasoning where a call is held back; False if the piece is still to be followed."""
        if held.region is None or held.region.closings:
            self._release_held_call(held)
            return False
        # A call without a closing has no other end than that of the reasoning around it.
        self._end_held_call(held, thought, piece.start, piece.start, is_closed=True)
        self._follow([piece])
        return True

    def _follow_held_body(
        self, held: _HeldCall, region: Region, body: _OpenBody, piece: TextPiece, thought: Region
    ) -> None:
        if region.quotes is not None and body.quotes(piece, region.quotes):
            held.add(piece)
        elif piece.is_one_of(region.closings):
            held.pieces.append(piece)
            self._end_held_call(held, thought, piece.start, piece.stop, is_closed=True, closing=piece.text)
        elif piece.is_one_of(region.ended_by):
            self._end_held_call(held, thought, piece.start, piece.start, is_closed=not region.closings)
            self._follow([piece])
        else:
            held.add(piece)

    def _end_held_call(
        self, held: _HeldCall, thought: Region, body_stop: int, stop: int | None, *, is_closed: bool, closing: str = ""
    ) -> None:
        """Decide whether it is a call: then the reasoning ends before it."""
        region, body = held.region, held.body
        assert region is not None
        assert body is not None
        attempts = self._read_attempts(region, body.build(), is_closed=is_closed)
        if not any(attempt.status is ToolCallStatus.OK for attempt in attempts):
            self._release_held_call(held)
            return
        self._held_call = None
        first = held.pieces[0].start
        self._leave(thought, first, first, is_closed=False)
        self._late_closings = thought.closings
        self._cut(self._content, first)
        self._region, self._body = region, body
        self._leave(region, body_stop, stop, is_closed=is_closed, closing=closing)

    def _release_held_call(self, held: _HeldCall) -> None:
        """Add what was held back as reasoning."""
        self._held_call = None
        for piece in held.pieces:
            self._add_reasoning(piece)

    def _add_reasoning(self, piece: TextPiece) -> None:
        if piece.is_one_of(self._call_openings):
            self._unread_calls.append([])
        if self._unread_calls:
            self._unread_calls[-1].append(piece.text)
        self._add_text(self._reasoning, PartKind.REASONING, piece.text, piece.start)

    def _end_unread_calls(self, *, is_closed: bool) -> None:
        """Report calls that stay in reasoning, if it was not closed: closed reasoning may be about calls."""
        unread, self._unread_calls = self._unread_calls, []
        if is_closed:
            return
        for texts in unread:
            call = CallAttempt(status=ToolCallStatus.IN_REASONING).to_call(
                "".join(texts), (self._parts.num_ids, self._parts.num_ids)
            )
            self._add_call(call)

    def _follow_header(self, piece: TextPiece, body: _OpenBody) -> None:
        header = self._call_format.header
        assert header is not None
        if piece.is_one_of(self._openings) or piece.is_one_of([header.opening]):
            self._end_header(body)
            self._body = None
            self._follow_outside(piece)
            return
        if not piece.is_one_of(header.closings):
            body.add(piece, header.inner_delimiters)
            return
        whole = body.build(closing=piece.text)
        region = header.route(whole)
        self._body = None
        stop = piece.stop
        text = body.opening + whole.text + piece.text
        if region is not None and region.is_plain:
            self._cut(self._content, body.opened_at, keeps_white_space=region.keeps_white_space)
            return
        if region is not None:
            self._enter(region, opened_at=body.opened_at, start=stop, header=whole, opening=text)
            return
        self._add_content(text, body.opened_at)
        if self._reads_headers:
            self._open_header(stop, stop)

    def _is_empty_reasoning(self, delimiter: str) -> bool:
        region = self._call_format.reasoning
        if region is None or not region.closes_alone or delimiter not in region.closings:
            return False
        is_first = self._content.is_empty and not (self._lead or self._was_once_opened or self._calls)
        self._was_once_opened |= is_first
        return is_first

    def _open_header(self, opened_at: int, start: int, *, opening: str = "") -> None:
        self._body = _OpenBody(opened_at=opened_at, start=start, opening=opening)

    def _enter(
        self, region: Region, *, opened_at: int, start: int, header: CallBody | None = None, opening: str = ""
    ) -> None:
        self._region = region
        self._was_once_opened |= region.once
        if not region.starts_with:
            self._cut(self._content, opened_at, keeps_white_space=region.keeps_white_space)
        if region.kind is PartKind.TOOL_CALL:
            self._body = _OpenBody(opened_at=opened_at, start=start, header=header, opening=opening)
        elif region.kind is PartKind.REASONING:
            self._reasoning.cut(keeps_white_space=region.keeps_white_space)

    def _leave(self, region: Region, body_stop: int, stop: int | None, *, is_closed: bool, closing: str = "") -> None:
        """Leave a region whose text ends at `body_stop`, its delimiters at `stop` (None: with the completion)."""
        body, self._body = self._body, None
        self._region = None
        if body is not None:
            self._finish_calls(region, body, stop, is_closed=is_closed, closing=closing)
        else:
            flow = self._reasoning if region.kind is PartKind.REASONING else self._content
            self._parts.begin(PartKind.MARKUP, body_stop - flow.num_held)
            flow.cut()
            self._end_unread_calls(is_closed=is_closed)
        if region.kind is not PartKind.CONTENT and not region.starts_with:
            self._content.cut()
        if self._reads_headers and stop is not None:
            self._open_header(stop, stop)

    def _end(self) -> bool:
        """End the completion; returns whether its reasoning is complete."""
        self._end_last_held_call()
        region = self._region
        if region is None:
            if self._body is not None:
                self._end_header(self._body)
            self._release_lead()
            self._emit(PartKind.CONTENT, self._content.end())
            return True
        is_closed = self._is_closed_by_stop(region)
        if region.kind is PartKind.CONTENT:
            self._emit(PartKind.CONTENT, self._content.end())
        else:
            self._leave(region, self._stream.length, None, is_closed=is_closed)
            self._emit(PartKind.CONTENT, self._content.end())
        return region.kind is not PartKind.REASONING or is_closed

    def _end_last_held_call(self) -> None:
        held, thought = self._held_call, self._region
        if held is None or thought is None:
            return
        if held.region is None:
            self._release_held_call(held)
            return
        is_closed = self._is_closed_by_stop(held.region)
        self._end_held_call(held, thought, self._stream.length, None, is_closed=is_closed)

    def _is_closed_by_stop(self, region: Region) -> bool:
        stops = self._stream.stop_texts
        return any(stop in region.closings for stop in stops) if region.closings else bool(stops)

    def _end_header(self, body: _OpenBody) -> None:
        """End a header that was not closed. Without any delimiter it is content."""
        header = self._call_format.header
        whole = body.build()
        if header is not None and header.is_content_if_unclosed:
            self._add_content(body.opening + whole.text, body.opened_at)
        elif whole.inner_delimiters or body.opening:
            self._cut(self._content, body.opened_at)
        else:
            self._add_content(whole.text, body.opened_at)

    # Text

    def _add_content(self, text: str, start: int) -> None:
        if self._lead:
            text, start, self._lead = self._lead + text, start - len(self._lead), ""
        if self._start_regions and self._content.is_empty and not self._calls:
            stripped = text.lstrip()
            first = start + len(text) - len(stripped)
            region = next((region for region in self._start_regions if stripped.startswith(region.starts_with)), None)
            if region is not None or self._may_begin_region(stripped):
                self._add_text(self._content, PartKind.CONTENT, text[: first - start], start)
                if region is None:
                    self._lead, self._lead_start = stripped, first
                    return
                self._enter(region, opened_at=first, start=first)
                self._follow_inside(TextPiece(stripped, first), region)
                return
        self._add_text(self._content, PartKind.CONTENT, text, start)

    def _may_begin_region(self, text: str) -> bool:
        return bool(text) and any(region.starts_with.startswith(text) for region in self._start_regions)

    def _release_lead(self) -> None:
        """Add text as content that might have begun a region by its `starts_with`, but did not."""
        lead, self._lead = self._lead, ""
        if lead:
            self._add_text(self._content, PartKind.CONTENT, lead, self._lead_start)

    def _add_text(self, flow: _TextJoiner, kind: PartKind, text: str, start: int) -> None:
        certain, num_trimmed = flow.add(text)
        if num_trimmed < len(text):
            self._parts.begin(kind, start + num_trimmed, since=self._delimiter_stop)
        self._emit(kind, certain)

    def _cut(self, flow: _TextJoiner, at: int, *, keeps_white_space: bool = False) -> None:
        """Begin markup at a delimiter at this character, with the white space before it."""
        self._parts.begin(PartKind.MARKUP, at - flow.num_held)
        flow.cut(keeps_white_space=keeps_white_space)

    def _emit(self, kind: PartKind, text: str) -> None:
        if text:
            self._deltas.append(Delta(kind=kind, text=text))

    # Calls

    def _finish_calls(
        self, region: Region, body: _OpenBody, stop: int | None, *, is_closed: bool, closing: str
    ) -> None:
        whole = body.build()
        attempts = self._read_attempts(region, whole, is_closed=is_closed)
        if region.starts_with and not attempts:
            self._add_text(self._content, PartKind.CONTENT, whole.text, body.start)
            return
        if region.starts_with:
            self._cut(self._content, body.opened_at)
            self._content.cut()
        for call in _build_calls(attempts, body, whole.text, closing, stop, self._parts):
            self._add_call(call)

    def _report_calls_behind_text(self) -> None:
        """Report calls that end the turn but do not begin it, where they are the whole turn.

        vLLM (`llama3_json`) and SGLang (`pythonic`) read them. In our view they may be text about calls: they stay
        content, and are failures, which are counted and which the model can be told of.
        """
        if self._calls or not self._tools:
            return
        names = set(list_names(self._tools))
        span = (self._parts.num_ids, self._parts.num_ids)
        for region, raw in self._list_possible_calls():
            attempts = self._read_attempts(region, CallBody(text=raw), is_closed=True)
            if attempts and all(each.status is ToolCallStatus.OK and each.name in names for each in attempts):
                # No deltas: the text has been returned as content.
                self._calls += [
                    CallAttempt(status=ToolCallStatus.BEHIND_TEXT, name=each.name).to_call(
                        raw[slice(*each.span)] if each.span else raw, span
                    )
                    for each in attempts
                ]
                return

    def _list_possible_calls(self) -> Iterator[tuple[Region, str]]:
        """The ends of the content that begin like a call, each with the region that it would be."""
        text, num_chars = self._content.text, 0
        for region in self._start_regions:
            for match in re.finditer(re.escape(region.starts_with), text):
                raw = text[match.start() :]
                num_chars += len(raw)
                if num_chars > _MAX_CHARS_BEHIND_TEXT:
                    return
                yield region, raw

    def _read_attempts(self, region: Region, body: CallBody, *, is_closed: bool) -> Sequence[CallAttempt]:
        """Read a region's body as attempts.

        In a region that was cut, only a call without closings may be complete, and none behind which something must
        follow.
        """
        assert region.read_calls is not None
        is_open = bool(body.inner_delimiters) and not body.text[body.inner_delimiters[-1].stop :].strip()
        if not is_closed and (region.closings or is_open):
            return [CallAttempt(status=ToolCallStatus.UNCLOSED)]
        attempts = region.read_calls(replace(body, value_ends=self._call_format.value_ends), self._tools)
        if is_closed:
            return attempts
        return [
            attempt
            if attempt.status is ToolCallStatus.OK
            else CallAttempt(status=ToolCallStatus.UNCLOSED, name=attempt.name, span=attempt.span)
            for attempt in attempts
        ]

    def _add_call(self, call: ParsedToolCall) -> None:
        self._calls.append(call)
        self._deltas.append(Delta(kind=PartKind.TOOL_CALL, tool_call=call))


@dataclass(slots=True, kw_only=True)
class _OpenBody:
    """The body of a call or header that is being read; positions are characters of the completion."""

    opened_at: int
    """Where its part begins: at the opening, or at that of its header."""
    start: int
    header: CallBody | None = None
    opening: str = ""
    """The delimiter before it, with its header."""
    texts: list[str] = field(default_factory=list)
    inner_delimiters: list[InnerDelimiter] = field(default_factory=list)
    _is_quoted: bool = False

    def quotes(self, piece: TextPiece, marks: tuple[str, str]) -> bool:
        """Whether this next piece is inside quotes, or one of the two marks that open and close them."""
        was_quoted = self._is_quoted
        if piece.is_delimiter and piece.text == marks[was_quoted]:
            self._is_quoted = not was_quoted
        return was_quoted or self._is_quoted

    def add(self, piece: TextPiece, inner_delimiters: Collection[str]) -> None:
        """Add a piece; delimiters among `inner_delimiters` are noted."""
        if piece.is_one_of(inner_delimiters):
            start = piece.start - self.start
            self.inner_delimiters.append(
                InnerDelimiter(delimiter=piece.text, start=start, stop=start + len(piece.text))
            )
        self.texts.append(piece.text)

    def build(self, *, closing: str = "") -> CallBody:
        """Build the body from its pieces."""
        return CallBody(
            text="".join(self.texts), inner_delimiters=tuple(self.inner_delimiters), header=self.header, closing=closing
        )


@dataclass(slots=True, kw_only=True)
class _HeldCall:
    """What may be a call inside reasoning: its pieces, and its body once a call is opened."""

    pieces: list[TextPiece] = field(default_factory=list)
    region: Region | None = None
    body: _OpenBody | None = None

    def open(self, piece: TextPiece, region: Region | None) -> None:
        """Take the opening of a call with its region, or of a section of calls, which has none."""
        self.pieces.append(piece)
        if region is not None:
            self.region = region
            self.body = _OpenBody(opened_at=piece.start, start=piece.stop, opening=piece.text)

    def add(self, piece: TextPiece) -> None:
        """Take a piece of the body."""
        assert self.region is not None
        assert self.body is not None
        self.pieces.append(piece)
        self.body.add(piece, self.region.inner_delimiters)


def _build_calls(
    attempts: Sequence[CallAttempt], body: _OpenBody, text: str, closing: str, stop: int | None, parts: PartBuilder
) -> list[ParsedToolCall]:
    """Build calls from attempts, each with the ids of its own part, or all with those of the whole region.

    `closing` is the delimiter that closed the region, if any; `stop` is the character after it, None if the completion
    ends in the region.
    """
    if _have_own_spans(attempts, len(text)):
        calls = [_build_own_call(attempt, body.start, text, parts) for attempt in attempts]
        if stop is not None:
            parts.begin(PartKind.MARKUP, stop)
        return calls
    first = parts.begin(PartKind.TOOL_CALL, body.opened_at) if attempts else 0
    last = parts.num_ids if stop is None else parts.begin(PartKind.MARKUP, stop)
    full_text = body.opening + text + closing
    return [attempt.to_call(text, (first, last), full_text=full_text) for attempt in attempts]


def _build_own_call(attempt: CallAttempt, start: int, text: str, parts: PartBuilder) -> ParsedToolCall:
    assert attempt.span is not None
    first = parts.begin(PartKind.TOOL_CALL, start + attempt.span[0])
    last = parts.begin(PartKind.MARKUP, start + attempt.span[1])
    return attempt.to_call(text[slice(*attempt.span)], (first, last))


def _have_own_spans(attempts: Sequence[CallAttempt], num_chars: int) -> bool:
    position = 0
    for attempt in attempts:
        if attempt.span is None or not position <= attempt.span[0] < attempt.span[1] <= num_chars:
            return False
        position = attempt.span[1]
    return bool(attempts)


class _TextJoiner:
    """Joins the pieces of a turn's answer, or of its reasoning, and trims them next to delimiters.

    White space next to a delimiter only separates parts, and pieces of text with something between them are joined by a
    newline. At the beginning and at the end of the turn nothing is trimmed. White space is held back until something
    follows it.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._held: list[str] = []
        self._is_cut = False
        self._is_exact = False

    @property
    def text(self) -> str:
        """The text that is certain."""
        return "".join(self._texts)

    @property
    def is_empty(self) -> bool:
        """Whether there is no text yet."""
        return not self._texts

    @property
    def num_held(self) -> int:
        """The number of characters of white space that are held back."""
        return sum(map(len, self._held))

    def add(self, text: str) -> tuple[str, int]:
        """Add text; returns the text that is certain now, and the number of characters trimmed at the beginning."""
        num_trimmed = 0
        joint = ""
        if self._is_cut:
            kept = text if self._is_exact else text.lstrip()
            num_trimmed = len(text) - len(kept)
            if not kept:
                return "", num_trimmed
            self._is_cut = False
            joint = "\n" if self._texts else ""
            text = kept
        body = text if self._is_exact else text.rstrip()
        if not body:
            self._held.append(joint + text)
            return "", num_trimmed
        certain = joint + "".join(self._held) + body
        self._held = [text[len(body) :]] if len(body) < len(text) else []
        self._texts.append(certain)
        return certain, num_trimmed

    def cut(self, *, keeps_white_space: bool = False) -> None:
        """Drop the white space around a delimiter, but not that after it if `keeps_white_space`."""
        self._held = []
        self._is_cut = True
        self._is_exact = keeps_white_space

    def end(self) -> str:
        """End the text; returns what was held back."""
        held = "".join(self._held)
        self._held = []
        if held:
            self._texts.append(held)
        return held
