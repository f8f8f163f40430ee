r"""The Hermes form, also Qwen's: `<think>` reasoning and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

<think>\nadd them\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
       `-- reasoning --´        `- content -´  `------------------ one call, its span --------------------------´
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from unbroken.rendering.base import ParsedResponse, ParsedToolCall, ToolCallStatus
from unbroken.rendering.control import AddedTokens
from unbroken.rendering.parsing.markers import Marker, MarkerScanner

CALL_OPENING, CALL_CLOSING = "<tool_call>", "</tool_call>"
REASONING_OPENING, REASONING_CLOSING = "<think>", "</think>"


class HermesParser:
    """Reasoning first, then text and calls in any order.

    Reasoning begins with the completion if the prompt opened it, else at the first opening unless a call came before.
    It ends at the first closing after that. Whatever stands inside it is reasoning, calls included; any delimiter of
    reasoning elsewhere is text.
    """

    def __init__(
        self,
        *,
        control: AddedTokens,
        decode: Callable[[Sequence[int]], str],
        reasoning: tuple[str, str] = (REASONING_OPENING, REASONING_CLOSING),
    ) -> None:
        self._reasoning = reasoning
        self._scanner = MarkerScanner((*reasoning, CALL_OPENING, CALL_CLOSING), control=control, decode=decode)

    def parse(self, completion_ids: Sequence[int], *, reasoning_opened: bool) -> ParsedResponse:
        """Read a completion; see `ResponseParser`."""
        marked = self._scanner.scan(completion_ids)
        reasoning = self._find_reasoning(marked.markers, len(marked.text), opened=reasoning_opened)
        attempts = list(_find_attempts(marked.markers[reasoning.num_markers :], len(completion_ids), len(marked.text)))
        pieces = [marked.text[: reasoning.opened_at]] if reasoning.resumed_at else []
        position = reasoning.resumed_at
        for attempt in attempts:
            pieces.append(marked.text[position : attempt.chars[0]])
            position = attempt.chars[1]
        pieces.append(marked.text[position:])
        return ParsedResponse(
            content=_join(pieces),
            reasoning=marked.text[reasoning.start : reasoning.stop].strip(),
            tool_calls=tuple(_read_call(marked.text[slice(*attempt.raw)], attempt) for attempt in attempts),
            reasoning_complete=reasoning.is_complete,
        )

    def _find_reasoning(self, markers: Sequence[Marker], end: int, *, opened: bool) -> _Reasoning:
        opening, closing = self._reasoning
        opened_at = start = first = 0
        if not opened:
            kinds = [marker.delimiter for marker in markers]
            if opening not in kinds or CALL_OPENING in kinds[: kinds.index(opening)]:
                return _Reasoning(opened_at=0, start=0, stop=0, resumed_at=0, num_markers=0, is_complete=True)
            first = kinds.index(opening) + 1
            opened_at, start = markers[first - 1].chars
        for k, marker in enumerate(markers[first:], start=first):
            if marker.delimiter == closing:
                stop, resumed_at = marker.chars
                return _Reasoning(
                    opened_at=opened_at,
                    start=start,
                    stop=stop,
                    resumed_at=resumed_at,
                    num_markers=k + 1,
                    is_complete=True,
                )
        return _Reasoning(
            opened_at=opened_at, start=start, stop=end, resumed_at=end, num_markers=len(markers), is_complete=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasoning:
    """Where the reasoning stands, in characters: its own text is [start, stop)."""

    opened_at: int
    start: int
    stop: int
    resumed_at: int
    num_markers: int
    """Markers up to and including the one that closes it."""
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One attempt at a call: its ids and characters, delimiters included, and the characters between those."""

    ids: tuple[int, int]
    chars: tuple[int, int]
    raw: tuple[int, int]
    is_closed: bool


def _find_attempts(markers: Sequence[Marker], num_ids: int, num_chars: int) -> Iterator[_Attempt]:
    """Pair the delimiters. A call in which another one opens, or the completion ends, is unclosed."""
    opened: Marker | None = None
    for marker in markers:
        if marker.delimiter == CALL_OPENING:
            if opened is not None:
                yield _attempt(opened, marker.ids[0], marker.chars[0], raw_stop=marker.chars[0], is_closed=False)
            opened = marker
        elif marker.delimiter == CALL_CLOSING and opened is not None:
            yield _attempt(opened, marker.ids[1], marker.chars[1], raw_stop=marker.chars[0], is_closed=True)
            opened = None
    if opened is not None:
        yield _attempt(opened, num_ids, num_chars, raw_stop=num_chars, is_closed=False)


def _attempt(opened: Marker, ids_stop: int, chars_stop: int, *, raw_stop: int, is_closed: bool) -> _Attempt:
    return _Attempt(
        ids=(opened.ids[0], ids_stop),
        chars=(opened.chars[0], chars_stop),
        raw=(opened.chars[1], raw_stop),
        is_closed=is_closed,
    )


def _read_call(raw: str, attempt: _Attempt) -> ParsedToolCall:
    if not attempt.is_closed:
        return ParsedToolCall(raw=raw, status=ToolCallStatus.UNCLOSED, span=attempt.ids)
    try:
        call = json.loads(raw, parse_constant=_refuse_constant)
        # Legal JSON that could not be written as JSON again: `1e999` is infinite, and a lone surrogate is no text.
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        return ParsedToolCall(raw=raw, status=ToolCallStatus.INVALID_JSON, span=attempt.ids)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=raw, status=ToolCallStatus.MISSING_NAME, span=attempt.ids)
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return ParsedToolCall(raw=raw, status=ToolCallStatus.INVALID_ARGUMENTS, span=attempt.ids)
    return ParsedToolCall(raw=raw, status=ToolCallStatus.OK, span=attempt.ids, name=name, arguments=arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _join(pieces: Sequence[str]) -> str:
    """The text around reasoning and calls, without the white space that sets those apart."""
    last = len(pieces) - 1
    trimmed = (
        piece.strip() if 0 < k < last else piece.rstrip() if k < last else piece.lstrip() if last else piece
        for k, piece in enumerate(pieces)
    )
    return "\n".join(piece for piece in trimmed if piece)
