"""Converts the parses of the package's renderers to our `ParsedResponse`.

The package returns the ids of each attempt at a call, but not those of reasoning and content. So the text around the
calls is reasoning up to its closing token, then content.

    [hm, </think>, so, <tool_call>, .., </tool_call>, <|im_end|>]
    reasoning (0, 1), markup (1, 2), content (2, 3), tool_call (3, 6), stop (6, 7)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from unbroken.rendering.base import ParsedResponse, ParsedToolCall, PartKind, ResponsePart, ToolCallStatus

_STATUSES = {
    "ok": ToolCallStatus.OK,
    "invalid_json": ToolCallStatus.INVALID_JSON,
    "unclosed_block": ToolCallStatus.UNCLOSED,
    "missing_name": ToolCallStatus.MISSING_NAME,
    "malformed_structure": ToolCallStatus.INVALID_SYNTAX,
}


def convert_parse(
    parsed: Any,
    completion_ids: Sequence[int],
    *,
    stop_token_ids: Sequence[int],
    reasoning_closing_id: int | None,
    decode: Callable[[Sequence[int]], str],
) -> ParsedResponse:
    """Convert the package's parse of `completion_ids` [T]; the `stop_token_ids` at their end are the stop.

    `reasoning_closing_id` is the id of `</think>`, if the tokenizer has it. Without it, the parts of a turn with
    reasoning and an answer are all content.
    """
    num_ids = len(completion_ids)
    num_read = num_ids
    while num_read and completion_ids[num_read - 1] in stop_token_ids:
        num_read -= 1
    calls = tuple(_convert_call(call, completion_ids[:num_read], decode) for call in parsed.tool_calls)
    reasoning = parsed.reasoning_content or ""
    is_complete = parsed.reasoning_complete is not False
    end = _find_end_of_reasoning(completion_ids[:num_read], reasoning, is_complete, reasoning_closing_id)
    parts = (*_build_parts(calls, end, num_read), *_build_part(PartKind.STOP, num_read, num_ids))
    return ParsedResponse(
        content=parsed.content, reasoning=reasoning, tool_calls=calls, reasoning_complete=is_complete, parts=parts
    )


def leave_calls_as_content(
    parsed: ParsedResponse, completion_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> ParsedResponse:
    """The same response for a turn that can have no calls: their text is content."""
    if not parsed.tool_calls:
        return parsed
    kinds = {PartKind.CONTENT, PartKind.TOOL_CALL}
    spans = [part.span for part in parsed.parts if part.kind in kinds]
    parts = tuple(
        ResponsePart(kind=PartKind.CONTENT if part.kind in kinds else part.kind, span=part.span)
        for part in parsed.parts
    )
    text = decode([token_id for span in spans for token_id in completion_ids[slice(*span)]])
    return replace(parsed, content=text.strip(), tool_calls=(), parts=parts)


def _find_end_of_reasoning(ids: Sequence[int], reasoning: str, is_complete: bool, closing_id: int | None) -> int:
    """The index of the reasoning's closing id; -1 if it is missing or unknown."""
    if not is_complete:
        return len(ids)
    if not reasoning or closing_id is None or closing_id not in ids:
        return -1
    return list(ids).index(closing_id)


def _build_parts(calls: Sequence[ParsedToolCall], end_of_reasoning: int, stop: int) -> Iterator[ResponsePart]:
    position = 0
    for first, last in sorted(call.span for call in calls):
        if last <= position:
            continue  # the package found two attempts in the same ids
        yield from _build_text_parts(position, first, end_of_reasoning)
        yield from _build_part(PartKind.TOOL_CALL, max(first, position), last)
        position = last
    yield from _build_text_parts(position, stop, end_of_reasoning)


def _build_text_parts(start: int, stop: int, end_of_reasoning: int) -> Iterator[ResponsePart]:
    yield from _build_part(PartKind.REASONING, start, min(stop, end_of_reasoning))
    yield from _build_part(PartKind.MARKUP, max(start, end_of_reasoning), min(stop, end_of_reasoning + 1))
    yield from _build_part(PartKind.CONTENT, max(start, end_of_reasoning + 1), stop)


def _build_part(kind: PartKind, start: int, stop: int) -> Iterator[ResponsePart]:
    if start < stop:
        yield ResponsePart(kind=kind, span=(start, stop))


def _convert_call(call: Any, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> ParsedToolCall:
    """Convert one attempt; without a span it gets all of `ids`, which end before the stop."""
    start, stop = call.token_span or (0, len(ids))
    span = (min(start, len(ids)), min(stop, len(ids)))
    full_text = decode(ids[slice(*span)])
    status = _STATUSES.get(str(call.status), ToolCallStatus.INVALID_SYNTAX)
    if status is ToolCallStatus.OK and not isinstance(call.arguments, dict):
        status = ToolCallStatus.INVALID_ARGUMENTS
    call_id = call.id or ""
    if status is not ToolCallStatus.OK:
        return ParsedToolCall(raw=call.raw, status=status, span=span, call_id=call_id, full_text=full_text)
    return ParsedToolCall(
        raw=call.raw,
        status=status,
        span=span,
        name=call.name,
        arguments=call.arguments,
        call_id=call_id,
        full_text=full_text,
    )
