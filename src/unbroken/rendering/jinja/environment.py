"""The Jinja environment that chat templates run in.

It is set up like the one in transformers (`transformers.utils.chat_template_utils`): Jinja's immutable sandbox with the
same tags, filters and functions, so that templates write the same text. Three things differ: an attribute that leads
out of the sandbox is an error instead of an empty text, `strftime_now` always gives the same time, and `lipsum`, which
writes random text, is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. `strftime_now` formats `now`, so that no text changes at midnight."""

    def __init__(self, *, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _make_clock(now)
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Decide as Jinja does, without the checks that never apply to text and namespaces: they double the time."""
        if type(obj) in (str, Namespace):
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute that leads out of the sandbox or changes a value: always raises `SecurityError`."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} must not be used")


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}` marks assistant text for training masks; here it is just the text."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write_body"), [], [], body).set_lineno(line)

    def _write_body(self, caller: Macro) -> str:
        text: str = caller()
        return text


def _make_clock(now: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002
        return now.strftime(format)

    return strftime_now


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: without HTML's escapes, and with the options of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
