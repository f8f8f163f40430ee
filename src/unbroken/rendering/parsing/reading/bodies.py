"""Collects the body of a region of calls while it comes, and builds the calls when it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedToolCall, PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt, InnerDelimiter, Region
from unbroken.rendering.parsing.reading.delimiters import Piece
from unbroken.rendering.parsing.reading.parts import PartBuilder


@dataclass(slots=True, kw_only=True)
class OpenBody:
    """The body of a call or header that is being read; positions are characters of the completion."""

    opened_at: int
    """Where its part begins: at the opening, or at that of its header."""
    start: int
    header: Body | None = None
    opening: str = ""
    """The delimiter before it, with its header."""
    texts: list[str] = field(default_factory=list)
    inner_delimiters: list[InnerDelimiter] = field(default_factory=list)
    _is_quoted: bool = False

    def quotes(self, piece: Piece, marks: tuple[str, str]) -> bool:
        """Whether this next piece is inside quotes, or one of the two marks that open and close them."""
        was_quoted = self._is_quoted
        if piece.is_delimiter and piece.text == marks[was_quoted]:
            self._is_quoted = not was_quoted
        return was_quoted or self._is_quoted

    def add(self, piece: Piece, inner_delimiters: Collection[str]) -> None:
        """Add a piece; delimiters among `inner_delimiters` are noted."""
        if piece.is_delimiter and piece.text in inner_delimiters:
            start = piece.start - self.start
            self.inner_delimiters.append(
                InnerDelimiter(delimiter=piece.text, start=start, stop=start + len(piece.text))
            )
        self.texts.append(piece.text)

    def build(self, *, closing: str = "") -> Body:
        """Build the body from its pieces."""
        return Body(
            text="".join(self.texts),
            inner_delimiters=tuple(self.inner_delimiters),
            header=self.header,
            closing=closing,
        )


def read_attempts(region: Region, body: Body, tools: Sequence[ToolSchema], *, is_closed: bool) -> Sequence[CallAttempt]:
    """Read a region's body as attempts.

    In a region that was cut, only a call without closings may be complete, and none behind which something must follow.
    """
    assert region.read_calls is not None
    is_open = bool(body.inner_delimiters) and not body.text[body.inner_delimiters[-1].stop :].strip()
    if not is_closed and (region.closings or is_open):
        return [CallAttempt(status=ToolCallStatus.UNCLOSED)]
    attempts = region.read_calls(body, tools)
    if is_closed:
        return attempts
    return [
        attempt
        if attempt.status is ToolCallStatus.OK
        else CallAttempt(status=ToolCallStatus.UNCLOSED, span=attempt.span)
        for attempt in attempts
    ]


def build_calls(
    attempts: Sequence[CallAttempt], body: OpenBody, text: str, closing: str, stop: int | None, parts: PartBuilder
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
