"""Finds the spellings of arguments that survive: a template writes parsed arguments in its own JSON style."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from unbroken.audit.conversations import TOOLS, make_call
from unbroken.audit.report import ArgumentsFinding, ArgumentSpelling
from unbroken.audit.subject import Subject
from unbroken.messages import Message

JsonStyle = dict[str, Any]
"""Keyword arguments of `json.dumps`."""

_VALUE = {"query": "Größe", "limit": 10, "exact": True, "days": [1, 2]}
_SPACED, _COMPACT = (", ", ": "), (",", ":")


def find_arguments(subject: Subject) -> ArgumentsFinding:
    """Find the template's JSON style, and which other spellings it rewrites to that style."""
    form = subject.facts.message_format.arguments.value
    style = find_json_style(subject)
    if style is None:
        return ArgumentsFinding(form=form, is_json=False, spellings=())
    return ArgumentsFinding(
        form=form,
        is_json=True,
        spellings=tuple(_check_spelling(subject, style, name, sampled) for name, sampled in _make_spellings(style)),
    )


def find_json_style(subject: Subject) -> JsonStyle | None:
    """Find how the template writes an object; None if it writes no JSON, or no calls."""
    if not subject.facts.message_format.renders_calls:
        return None
    rendered = _render(subject, _VALUE)
    for separators, ensure_ascii, sort_keys, indent in product(
        (_SPACED, _COMPACT), (False, True), (False, True), (None, 2, 4)
    ):
        style: JsonStyle = {
            "separators": separators if indent is None else (",", ": "),
            "ensure_ascii": ensure_ascii,
            "sort_keys": sort_keys,
            "indent": indent,
        }
        if json.dumps(_VALUE, **style) in rendered:
            return style
    return None


def _make_spellings(style: JsonStyle) -> Iterator[tuple[str, str]]:
    """Make arguments in the template's style with one thing changed, each with its name."""
    plain: JsonStyle = {**style, "indent": None, "sort_keys": False}
    words = {"query": "Oslo", "limit": 10}
    yield "spaced", json.dumps(words, **{**plain, "separators": _SPACED})
    yield "compact", json.dumps(words, **{**plain, "separators": _COMPACT})
    yield "order of keys", json.dumps({"query": "Oslo", "limit": 10, "exact": True}, **plain)
    yield "unicode as it is", json.dumps({"query": "Größe"}, **{**plain, "ensure_ascii": False})
    yield "unicode escaped", json.dumps({"query": "Größe"}, **{**plain, "ensure_ascii": True})
    for name, number in (("trailing zero", "1.50"), ("exponent", "1e3")):
        yield name, json.dumps({"limit": 0}, **plain).replace("0", number)
    yield "escaped slash", json.dumps({"query": "a/b"}, **plain).replace("/", "\\/")


def _check_spelling(subject: Subject, style: JsonStyle, name: str, sampled: str) -> ArgumentSpelling:
    value = json.loads(sampled)
    rendered = _render(subject, value)
    is_kept = sampled in rendered
    canonical = json.dumps(value, **style)
    return ArgumentSpelling(
        name=name,
        sampled=sampled,
        is_kept=is_kept,
        rendered="" if is_kept or canonical not in rendered else canonical,
    )


def _render(subject: Subject, value: dict[str, Any]) -> str:
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [make_call("search", "callzqe0z", value)]}
    return subject.render_text([{"role": "user", "content": "hi"}, turn], tools=TOOLS) or ""
