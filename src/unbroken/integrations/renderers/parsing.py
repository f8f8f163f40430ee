"""What the package's renderers read out of a completion, in our words.

The package says which ids each attempt at a call came from, and nothing of the kind for reasoning and content. Parts
are built from that: calls where the package saw them, around them reasoning up to its closing token, then content.

    [hm, </think>, so, <tool_call>, .., </tool_call>, <|im_end|>]
    reasoning (0, 1), markup (1, 2), content (2, 3), tool_call (3, 6), stop (6, 7)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    parsed: Any, completion_ids: Sequence[int], *, stop_token_ids: Sequence[int], reasoning_closing_id: int | None
) -> ParsedResponse:
    """The package's `ParsedResponse` as ours.

    Args:
        parsed: what the package's renderer returned for `completion_ids`.
        completion_ids: [T] the ids, stop id included.
        stop_token_ids: the renderer's; those at the end of the completion are its stop.
        reasoning_closing_id: the id of `</think>`, where the tokenizer has one. Without it a turn that both reasons and
            answers is content as a whole, as far as its parts tell.
    """
    num_ids = len(completion_ids)
    num_read = num_ids
    while num_read and completion_ids[num_read - 1] in stop_token_ids:
        num_read -= 1
    calls = tuple(_read_call(call, num_read) for call in parsed.tool_calls)
    reasoning = parsed.reasoning_content or ""
    is_complete = parsed.reasoning_complete is not False
    end = _end_of_reasoning(completion_ids[:num_read], reasoning, is_complete, reasoning_closing_id)
    parts = (*_parts_read(calls, end, num_read), *_part(PartKind.STOP, num_read, num_ids))
    return ParsedResponse(
        content=parsed.content, reasoning=reasoning, tool_calls=calls, reasoning_complete=is_complete, parts=parts
    )


def _end_of_reasoning(ids: Sequence[int], reasoning: str, is_complete: bool, closing_id: int | None) -> int:
    """Where the closing of the reasoning stands in `ids`; -1 if there is none or nothing tells."""
    if not is_complete:
        return len(ids)
    if not reasoning or closing_id is None or closing_id not in ids:
        return -1
    return list(ids).index(closing_id)


def _parts_read(calls: Sequence[ParsedToolCall], end_of_reasoning: int, stop: int) -> Iterator[ResponsePart]:
    position = 0
    for first, last in sorted(call.span for call in calls):
        if last <= position:
            continue  # the package saw two attempts in the same ids
        yield from _parts_of_text(position, first, end_of_reasoning)
        yield from _part(PartKind.TOOL_CALL, max(first, position), last)
        position = last
    yield from _parts_of_text(position, stop, end_of_reasoning)


def _parts_of_text(start: int, stop: int, end_of_reasoning: int) -> Iterator[ResponsePart]:
    yield from _part(PartKind.REASONING, start, min(stop, end_of_reasoning))
    yield from _part(PartKind.MARKUP, max(start, end_of_reasoning), min(stop, end_of_reasoning + 1))
    yield from _part(PartKind.CONTENT, max(start, end_of_reasoning + 1), stop)


def _part(kind: PartKind, start: int, stop: int) -> Iterator[ResponsePart]:
    if start < stop:
        yield ResponsePart(kind=kind, span=(start, stop))


def _read_call(call: Any, num_read: int) -> ParsedToolCall:
    """One attempt; without a span of its own it gets all ids that were read."""
    start, stop = call.token_span or (0, num_read)
    span = (min(start, num_read), min(stop, num_read))
    status = _STATUSES.get(str(call.status), ToolCallStatus.INVALID_SYNTAX)
    if status is ToolCallStatus.OK and not isinstance(call.arguments, dict):
        status = ToolCallStatus.INVALID_ARGUMENTS
    call_id = call.id or ""
    if status is not ToolCallStatus.OK:
        return ParsedToolCall(raw=call.raw, status=status, span=span, call_id=call_id)
    return ParsedToolCall(
        raw=call.raw, status=status, span=span, name=call.name, arguments=call.arguments, call_id=call_id
    )
