r"""Reads calls written in Python, such as `[add(a=1, b={"x": [True, None]}), now()]`. Nothing is executed.

The text is parsed by `ast`, as literals only, after a conversion to plain ASCII:

    [get-time(from='é\d')]   ->   [n0(n1='\xe9\\d')]

Names become placeholders, because tools and parameters may have names that Python does not allow (`from`, `get-time`).
In strings, newlines and backslashes that begin no escape are escaped, because models copy templates that do not escape.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody
from unbroken.rendering.parsing.syntax.json_calls import check_writable

MAX_CHARS = 200_000
"""The limit, because `ast` needs hundreds of bytes for each character."""
MAX_DEPTH = 50
"""Nested brackets."""

_TOKEN = re.compile(
    r"(?P<string>'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\")"
    r"|(?P<name>(?<![\w.\-])[^\W\d][\w.\-]*+)(?=\s*(?:\(|=(?!=)))"
    r"|(?P<refused>['\"#]|[-+~]\s*[-+~]|\bn\d|\w(?=['\"])|[0-9_](?:and|else|for|if|in|is|or|not))",
    re.DOTALL,
)
_FIRST_NAME = re.compile(r"\s*(?:\[\s*)?(?P<name>[^\W\d][\w.\-]*)\s*\(")
_NEW_LINE = re.compile(r"(?<=\))\s*\n")
_PLACEHOLDER = re.compile(r"n[0-9]+")
_BACKSLASH = re.compile(
    r"\\(?:(?P<escape>[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}"
    r"|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7]))|(?P<text>.))",
    re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which templates write inside lists and objects. `ast` knows Python's own words."""


def read_python_calls(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """Read a list of calls, each with its span, or calls on lines or with commas. Other bodies are one attempt."""
    num_blank = len(body.text) - len(body.text.lstrip())
    source = _Source()
    try:
        tree = source.parse(body.text.strip())
    except _InvalidError as error:
        first = _FIRST_NAME.match(body.text)
        return [CallAttempt(status=error.status, name="" if first is None else first["name"])]
    if not isinstance(tree, (ast.List, ast.Tuple)):
        return [_read_attempt(tree, source)]
    return [replace(_read_attempt(item, source), span=source.get_span(item, num_blank)) for item in tree.elts]


def read_python_value(text: str) -> Any:
    """Read a literal as `repr` writes it. Raises `ValueError` for anything else, or what JSON does not have."""
    try:
        value = _read_value(_Source().parse(text.strip()))
        check_writable(value)
    except _InvalidError as error:
        raise ValueError(str(error)) from None
    return value


class _InvalidError(Exception):
    def __init__(self, message: str, status: ToolCallStatus = ToolCallStatus.INVALID_SYNTAX) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Source:
    """The converted text for `ast`, and the way back to the original."""

    names: list[str] = field(default_factory=list)
    """The names that the placeholders stand for."""
    _starts: list[int] = field(default_factory=list)
    """The beginnings of pieces of the converted text."""
    _originals: list[int] = field(default_factory=list)
    """The beginnings of these pieces in the original text."""

    def parse(self, text: str) -> ast.expr:
        if len(text) > MAX_CHARS:
            raise _InvalidError(f"longer than {MAX_CHARS} characters")
        try:
            return ast.parse(self._convert(text), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise _InvalidError(f"not Python: {error}") from None

    def get_name(self, node: ast.expr | str | None) -> str:
        placeholder = node.id if isinstance(node, ast.Name) else node
        if not isinstance(placeholder, str) or not _PLACEHOLDER.fullmatch(placeholder):
            raise _InvalidError("no name", ToolCallStatus.MISSING_NAME)
        return self.names[int(placeholder[1:])]

    def get_span(self, node: ast.expr, offset: int) -> tuple[int, int]:
        """The characters of a node in the original text, shifted by `offset`."""
        stop = node.end_col_offset
        assert stop is not None
        return offset + self._find_original(node.col_offset), offset + self._find_original(stop)

    def _find_original(self, position: int) -> int:
        """The original position of a border between pieces, or of a character in an unchanged piece."""
        k = bisect_right(self._starts, position) - 1
        return self._originals[k] + position - self._starts[k]

    def _convert(self, text: str) -> str:
        pieces: list[str] = []
        position = length = depth = 0
        for match in _TOKEN.finditer(text):
            between = text[position : match.start()]
            depth = _count_depth(between, depth)
            if depth == 0 and (line := _NEW_LINE.search(between)):  # calls on lines are as calls with commas
                between = f"{between[: line.start()]},{between[line.start() + 1 :]}"
            for piece, start in ((between, position), (self._convert_match(match), match.start())):
                pieces.append(piece)
                self._starts.append(length)
                self._originals.append(start)
                length += len(piece)
            position = match.end()
        _count_depth(text[position:], depth)
        self._starts.append(length)
        self._originals.append(position)
        source = "".join([*pieces, text[position:]])
        if not source.isascii():
            raise _InvalidError("a character that is not ASCII, outside of strings and names")
        return source.replace("\n", " ").replace("\r", " ")

    def _convert_match(self, match: re.Match[str]) -> str:
        if match["refused"]:
            raise _InvalidError(f"{match['refused']!r} does not belong here")
        if match["name"]:
            self.names.append(match["name"])
            return f"n{len(self.names) - 1}"
        escaped = _BACKSLASH.sub(lambda found: found[0] if found["escape"] else "\\\\" + found["text"], match["string"])
        escaped = escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\x00")
        return escaped.encode("ascii", "backslashreplace").decode("ascii")


def _count_depth(text: str, depth: int) -> int:
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise _InvalidError(f"more than {MAX_DEPTH} brackets in brackets")
    return depth


def _read_attempt(node: ast.expr, source: _Source) -> CallAttempt:
    name = ""
    try:
        name = source.get_name(node.func if isinstance(node, ast.Call) else None)
        assert isinstance(node, ast.Call)
        arguments = _read_arguments(node, source)
    except _InvalidError as error:
        return CallAttempt(status=error.status, name=name)
    return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=arguments)


def _read_arguments(node: ast.Call, source: _Source) -> dict[str, Any]:
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise _InvalidError("an argument without a name", ToolCallStatus.INVALID_ARGUMENTS)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        key = source.get_name(keyword.arg)
        if key in arguments:
            raise _InvalidError(f"{key} is given twice", ToolCallStatus.INVALID_ARGUMENTS)
        arguments[key] = _read_value(keyword.value)
    try:
        check_writable(arguments)
    except ValueError:
        raise _InvalidError("a value that JSON does not have", ToolCallStatus.INVALID_ARGUMENTS) from None
    return arguments


def _read_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return _join_surrogates(text)
        case ast.Constant(value=None | bool() | int() | float() as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _read_value(operand)
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                return -number
        case ast.List(elts=items):
            return [_read_value(item) for item in items]
        case ast.Dict():
            keys = [None if key is None else _read_value(key) for key in node.keys]  # None: `**others`
            if all(isinstance(key, str) for key in keys):
                return dict(zip(keys, map(_read_value, node.values), strict=True))
    raise _InvalidError("not a JSON literal", ToolCallStatus.INVALID_ARGUMENTS)


def _join_surrogates(text: str) -> str:
    """Join surrogate pairs: JSON writes a character above U+FFFF as two escapes, which Python does not join."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except ValueError:
        raise _InvalidError("half of a surrogate pair", ToolCallStatus.INVALID_ARGUMENTS) from None
