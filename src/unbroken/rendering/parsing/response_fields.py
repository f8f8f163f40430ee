"""Finds the fields of one of transformers' response templates in a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_SEARCH_TIMEOUT_S = 1.0
"""The patterns come from a tokenizer's files and may be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpan:
    """One field in a text; pairs are half-open ranges of characters."""

    name: str
    whole: tuple[int, int]
    """With its delimiters."""
    body: tuple[int, int]
    is_closed: bool
    captures: dict[str, str] = field(default_factory=dict)
    """The named groups of its opening's match."""


def find_fields(spec: Any, text: str, *, first: str | None = None) -> Iterator[FieldSpan]:
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
            return  # an empty closing of an empty field: transformers stops here too
        current = name if is_opening else spec.implicit
        captures = {key: value for key, value in match.groupdict().items() if value is not None} if is_opening else {}
        whole_start, position = match.start(), match.end()


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
