"""Where the fields of one of transformers' response templates stand in a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_SECONDS = 1.0
"""For one search: the patterns come from a tokenizer's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpan:
    """One field, at these characters."""

    name: str
    whole: tuple[int, int]
    """Its delimiters included."""
    body: tuple[int, int]
    is_closed: bool
    captures: dict[str, str] = field(default_factory=dict)
    """What the named groups of its opening matched."""


def find_fields(spec: Any, text: str, *, opened: str | None = None) -> Iterator[FieldSpan]:
    """All fields, from left to right; `opened` is the one that the text begins in.

    As transformers does it: in a field with an opening only its closing counts. Elsewhere, which is the field without
    an opening if there is one, the opening that begins first counts, of several the longest. `spec` is its
    `ResponseTemplate`.
    """
    current = opened or spec.implicit
    captures: dict[str, str] = {}
    whole_start = position = 0
    while True:
        name, match = _next(spec, text, position, current)
        stop = len(text) if match is None else match.start()
        if current is not None and (stop > position or current != spec.implicit):
            is_closed = match is not None and name == current
            yield FieldSpan(
                name=current,
                whole=(whole_start, match.end() if match is not None and is_closed else stop),
                body=(position, stop),
                is_closed=is_closed or current == spec.implicit,
                captures=captures,
            )
        if match is None:
            return
        is_opening = name != current
        if match.end() == position and not is_opening:
            return  # an empty closing of what is empty: transformers stops here as well
        current = name if is_opening else spec.implicit
        captures = {key: value for key, value in match.groupdict().items() if value is not None} if is_opening else {}
        whole_start, position = match.start(), match.end()


def _next(spec: Any, text: str, position: int, current: str | None) -> tuple[str | None, Any]:
    """The delimiter that comes next, and the field that it opens, or the current one if it closes that."""
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
        return pattern.search(text, position, timeout=_SECONDS)
    except TimeoutError:
        return None
