"""The body of a call's region: collected while it comes, and made into calls when it ends."""

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
    """The body of a call or header that is being read."""

    opened_at: int
    """The character where its part begins: the opening, or its header's."""
    start: int
    """The character where its text begins."""
    header: Body | None = None
    opening: str = ""
    texts: list[str] = field(default_factory=list)
    marks: list[InnerDelimiter] = field(default_factory=list)

    def add(self, piece: Piece, inner: Collection[str]) -> None:
        """Take a piece of it; the delimiters among `inner` are noted."""
        if piece.is_delimiter and piece.text in inner:
            start = piece.start - self.start
            self.marks.append(InnerDelimiter(delimiter=piece.text, start=start, stop=start + len(piece.text)))
        self.texts.append(piece.text)

    def whole(self) -> Body:
        """All of it."""
        return Body(text="".join(self.texts), marks=tuple(self.marks), header=self.header)


def read_attempts(region: Region, body: Body, tools: Sequence[ToolSchema], *, is_closed: bool) -> Sequence[CallAttempt]:
    """What a region's body is. Of one that was cut, only a call that has no closing may still read."""
    assert region.read is not None
    if not is_closed and region.closings:
        return [CallAttempt(status=ToolCallStatus.UNCLOSED)]
    attempts = region.read(body, tools)
    if is_closed:
        return attempts
    return [
        attempt
        if attempt.status is ToolCallStatus.OK
        else CallAttempt(status=ToolCallStatus.UNCLOSED, span=attempt.span)
        for attempt in attempts
    ]


def place_attempts(
    attempts: Sequence[CallAttempt], body: OpenBody, text: str, stop: int | None, parts: PartBuilder
) -> list[ParsedToolCall]:
    """The attempts as calls, each with the ids of its own part, or all with those of the region.

    The region's delimiters end before the character `stop`; None: the completion ends in it.
    """
    if _are_apart(attempts, len(text)):
        calls = [_place_apart(attempt, body.start, text, parts) for attempt in attempts]
        if stop is not None:
            parts.begin(PartKind.MARKUP, stop)
        return calls
    first = parts.begin(PartKind.TOOL_CALL, body.opened_at) if attempts else 0
    last = parts.num_ids if stop is None else parts.begin(PartKind.MARKUP, stop)
    return [_call(attempt, text, (first, last)) for attempt in attempts]


def _place_apart(attempt: CallAttempt, start: int, text: str, parts: PartBuilder) -> ParsedToolCall:
    assert attempt.span is not None
    first = parts.begin(PartKind.TOOL_CALL, start + attempt.span[0])
    last = parts.begin(PartKind.MARKUP, start + attempt.span[1])
    return _call(attempt, text[slice(*attempt.span)], (first, last))


def _call(attempt: CallAttempt, raw: str, span: tuple[int, int]) -> ParsedToolCall:
    return ParsedToolCall(
        raw=raw,
        status=attempt.status,
        span=span,
        name=attempt.name,
        arguments=attempt.arguments,
        call_id=attempt.call_id,
    )


def _are_apart(attempts: Sequence[CallAttempt], num_chars: int) -> bool:
    """Whether each attempt has characters of its own."""
    position = 0
    for attempt in attempts:
        if attempt.span is None or not position <= attempt.span[0] < attempt.span[1] <= num_chars:
            return False
        position = attempt.span[1]
    return bool(attempts)
