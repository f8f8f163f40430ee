r"""Gemma 4 and FunctionGemma: calls without quotes, reasoning in a channel of Gemma 4.

    <|channel>thought\nadd them\n<channel|>Let me see.<|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>
                       `reasoning´         `-content-´`----------------- one call ------------------------´
    <start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>

Strings are found by the delimiters around them, not by their text, so that they may contain anything. A channel of
another name is content. Gemma 4 stops after its calls with `<|tool_response>`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Header, Region, call_region
from unbroken.rendering.parsing.syntax.json_calls import read_json

_MAX_DEPTH = 50
"""Nested brackets."""

_NAME = re.compile(r"\s*call:\s*(?P<name>[^\s{}\[\],:<>]+(?::[^\s{}\[\],:<>]+)*)\s*(?=\{)")
_BLANK = re.compile(r"\s*")
_BARE = re.compile(r"[^{}\[\],:]+")
_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
"""Some versions of the template write Python's words."""


class _SyntaxError(ValueError):
    """The text is not a call."""


def _read_call(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    """Read a body that is one call."""
    found = _NAME.match(body.text)
    if found is None:
        is_call = re.match(r"\s*call:\s*\{", body.text)
        return [CallAttempt(status=ToolCallStatus.MISSING_NAME if is_call else ToolCallStatus.INVALID_SYNTAX)]
    try:
        arguments = _Values(body).read_object(found.end())
    except _SyntaxError:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return [CallAttempt(status=ToolCallStatus.OK, name=found["name"], arguments=arguments)]


class _Values:
    def __init__(self, body: CallBody) -> None:
        self._text = body.text
        self._position = 0
        pairs = zip(body.inner_delimiters[::2], body.inner_delimiters[1::2], strict=False)
        self._strings = {first.start: (first.stop, last.start, last.stop) for first, last in pairs}
        self._starts = sorted(self._strings)
        if len(body.inner_delimiters) % 2:
            raise _SyntaxError("a string is not closed")

    def read_object(self, start: int) -> dict[str, Any]:
        """Read the object that begins at `start` and is the rest of the body."""
        self._position = start
        value = self._read_object(0)
        if self._peek():
            raise _SyntaxError("something follows the call")
        return value

    def _peek(self) -> str:
        """Skip white space and return the next character; empty at the end."""
        match = _BLANK.match(self._text, self._position)
        assert match is not None
        self._position = match.end()
        return self._text[self._position : self._position + 1]

    def _take(self, expected: str) -> bool:
        if self._peek() != expected or self._position in self._strings:
            return False
        self._position += 1
        return True

    def _read_object(self, depth: int) -> dict[str, Any]:
        self._expect("{", depth)
        values: dict[str, Any] = {}
        while not self._take("}"):
            if values and not self._take(","):
                raise _SyntaxError("no comma")
            self._peek()
            is_bare = self._position not in self._strings
            key = self._read_string_or_word()
            if is_bare and key[0] in "\"'":  # JSON's or Python's: the key would be another one, with quotes in it
                raise _SyntaxError("quotes that are not delimiters")
            if not self._take(":") or key in values:
                raise _SyntaxError("a key without a value, or given twice")
            values[key] = self._read_value(depth + 1)
        return values

    def _read_list(self, depth: int) -> list[Any]:
        self._expect("[", depth)
        values: list[Any] = []
        while not self._take("]"):
            if values and not self._take(","):
                raise _SyntaxError("no comma")
            values.append(self._read_value(depth + 1))
        return values

    def _expect(self, bracket: str, depth: int) -> None:
        if depth > _MAX_DEPTH or not self._take(bracket):
            raise _SyntaxError(f"no {bracket}, or too deep")

    def _read_value(self, depth: int) -> Any:
        character = self._peek()
        if self._position in self._strings:
            return self._read_string_or_word()
        if character == "{":
            return self._read_object(depth)
        if character == "[":
            return self._read_list(depth)
        word = self._read_string_or_word()
        if word in _WORDS:
            return _WORDS[word]
        try:
            value = read_json(word)
        except ValueError:
            raise _SyntaxError("no value") from None
        if isinstance(value, str):
            raise _SyntaxError("quotes that are not delimiters")
        return value

    def _read_string_or_word(self) -> str:
        self._peek()
        if self._position in self._strings:
            start, stop, self._position = self._strings[self._position]
            return self._text[start:stop]
        following = bisect_right(self._starts, self._position)
        stop = self._starts[following] if following < len(self._starts) else len(self._text)
        match = _BARE.match(self._text, self._position, stop)
        if match is None:
            raise _SyntaxError("a key or value is missing")
        self._position = match.end()
        return match.group().rstrip()


_THOUGHT = Region(kind=PartKind.REASONING, closings=("<channel|>",), ended_by=("<|tool_call>",))


def _route(header: CallBody) -> Region | None:
    return _THOUGHT if header.text.strip() == "thought" else None


GEMMA4 = CallFormat(
    name="gemma4",
    regions=(
        _THOUGHT,
        call_region(
            "<|tool_call>", "<tool_call|>", _read_call, ended_by=("<|tool_response>",), inner_delimiters=('<|"|>',)
        ),
    ),
    separators=("<|tool_response>",),
    header=Header(opening="<|channel>", closings=("\n",), route=_route),
    hints=("<|tool_call>",),
)
FUNCTION_GEMMA = CallFormat(
    name="function_gemma",
    regions=(
        call_region(
            "<start_function_call>",
            "<end_function_call>",
            _read_call,
            ended_by=("<start_function_response>",),
            inner_delimiters=("<escape>",),
        ),
    ),
    separators=("<start_function_response>",),
    hints=("<start_function_call>",),
)
