r"""Reads calls whose arguments are between tags, which the parser has found (`CallBody.inner_delimiters`).

    <invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">two</parameter>\n</invoke>     CallTags
    <function=add>\n<parameter=a>\n1\n</parameter>\n</function>                                                CallTags
    add<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n                                                    KeyValueTags

Other formats use `TagReader` themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, InnerDelimiter
from unbroken.rendering.parsing.syntax.arguments import convert_arguments, find_parameters

_NOT_BLANK = re.compile(r"\S")
_NAME = re.compile(r"""[^\s<>{}()\[\]"'=]+""")


class TagSyntaxError(ValueError):
    """The body does not follow its format. Never leaves this package."""

    name = ""
    """The function of the call, if its name could be read."""


class TagReader:
    """Reads a body from left to right."""

    def __init__(self, body: CallBody) -> None:
        self._text = body.text
        self._delimiters = body.inner_delimiters
        self._next = 0
        self._before_value, self._after_value = body.value_ends
        self.position = 0

    def skip_blank(self) -> None:
        """Skip white space."""
        match = _NOT_BLANK.search(self._text, self.position)
        self.position = match.start() if match else len(self._text)

    def is_at(self, delimiter: str) -> bool:
        """Whether this delimiter comes next, after white space."""
        self.skip_blank()
        return self.is_just_at(delimiter)

    def is_just_at(self, delimiter: str) -> bool:
        """Whether this delimiter comes next, without white space before it."""
        found = self._find_delimiter(self.position)
        return found is not None and found.delimiter == delimiter and found.start == self.position

    def is_at_end(self) -> bool:
        """Whether only white space is left."""
        self.skip_blank()
        return self.position == len(self._text)

    def expect(self, delimiter: str) -> None:
        """Skip white space and this delimiter. Raises `TagSyntaxError` if something else comes."""
        if not self.is_at(delimiter):
            raise TagSyntaxError(f"expected {delimiter!r} at character {self.position}")
        self.position += len(delimiter)

    def read_until(self, delimiter: str) -> str:
        """Read up to this delimiter, and skip it; others are text. Raises `TagSyntaxError` if it does not come."""
        start = self.position
        while (found := self._find_delimiter(self.position)) is not None:
            self.position = found.stop
            if found.delimiter == delimiter:
                return self._text[start : found.start]
        raise TagSyntaxError(f"expected {delimiter!r} after character {self.position}")

    def read_until_before(self, delimiter: str, following: Collection[str]) -> str:
        """Like `read_until`, up to the first such delimiter that the end, or one of `following`, comes after.

        Others are text: values are not escaped, and may contain the tag that ends them.
        """
        start = self.position
        while True:
            self.read_until(delimiter)
            stop = self.position - len(delimiter)
            if self.is_at_end() or any(map(self.is_at, following)):
                return self._text[start:stop]

    def strip_value(self, text: str) -> str:
        """Without what the template writes around each value (`CallFormat.value_ends`)."""
        return text.removeprefix(self._before_value).removesuffix(self._after_value)

    def read_until_text(self, end: str) -> str:
        """Read up to the text `end`, not a delimiter, and skip it. Raises `TagSyntaxError` if it does not come."""
        stop = self._text.find(end, self.position)
        if stop < 0:
            raise TagSyntaxError(f"expected {end!r} after character {self.position}")
        text = self._text[self.position : stop]
        self.position = stop + len(end)
        return text

    def read_key(self, end: str, known: Collection[str]) -> str:
        """Read a key up to `end`. If a newline should follow, a key with `end` in it must be one of the known ones.

        Raises `TagSyntaxError` if it is not: the rest could also be the value.
        """
        if not self._before_value.startswith("\n"):
            return self.read_until_text(end)
        start, tag = self.position, self._find_delimiter(self.position)
        key, stop = self.read_until_text(end), self._text.find(f"{end}\n", start, None if tag is None else tag.start)
        longer = self._text[start : max(stop, start)]
        if len(longer) <= len(key) or "\n" in longer or (key in known and longer not in known):
            return key
        if longer not in known:
            raise TagSyntaxError(f"{longer!r} may be a key, or a key and a part of its value")
        self.position = stop + len(end)
        return longer

    def read_until_next(self) -> str:
        """Read up to the next delimiter of any kind, or to the end."""
        found = self._find_delimiter(self.position)
        start, self.position = self.position, len(self._text) if found is None else found.start
        return self._text[start : self.position]

    def _find_delimiter(self, position: int) -> InnerDelimiter | None:
        """The first delimiter that begins at this character or later. Positions must not fall from call to call."""
        while self._next < len(self._delimiters) and self._delimiters[self._next].start < position:
            self._next += 1
        return self._delimiters[self._next] if self._next < len(self._delimiters) else None


def _is_name(text: str) -> bool:
    """Whether a text can be a function's name, in formats where white space and brackets end a name."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The tags of one call with a tag around each argument. Families differ in their tags only."""

    opening: str
    """Before the name: `<invoke name="`."""
    end_of_name: str
    """Attributes between the name and this text are ignored."""
    closing: str
    parameter: str
    """Before the key: `<parameter name="`."""
    end_of_key: str
    end_of_parameter: str
    string_attributes: Mapping[str, bool] = field(default_factory=dict)
    """Attributes after the key that say whether the value is a string; the value is JSON if not. Without one of them,
    the tool's schema decides."""
    writes_python: bool = False
    """Lists and objects are written as Python does."""
    quotes: tuple[str, str] | None = None
    """Around a value that is a string and may contain tags. The second ends with `end_of_parameter`."""
    unescape: Callable[[str], str] = str
    """For names and keys."""

    @property
    def inner_delimiters(self) -> tuple[str, ...]:
        """All, for `Region.inner_delimiters`."""
        tags = (self.opening, self.closing, self.parameter, self.end_of_parameter, *(self.quotes or ()))
        return tuple(dict.fromkeys(tags))

    def read_section(self, body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read a body of several calls, each with its span."""
        tags = TagReader(body)
        attempts: list[CallAttempt] = []
        while not tags.is_at_end():
            start = tags.position
            try:
                attempts.append(self.read(tags, tools))
            except TagSyntaxError as error:
                # The beginning of the next call is unknown now.
                span = (start, len(body.text))
                attempts.append(CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=error.name, span=span))
                break
        return attempts

    def read_single(self, body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read a body of one call."""
        tags = TagReader(body)
        try:
            call = self.read(tags, tools)
            if tags.is_at_end():
                return [replace(call, span=None)]
            name = call.name
        except TagSyntaxError as error:
            name = error.name
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=name)]

    def read_inside(self, body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read the body of a region that `opening` opened and `closing` closed."""
        tags = TagReader(body)
        try:
            call = self._read_rest(tags, tools)
            if tags.is_at_end():
                return [call]
            name = call.name
        except TagSyntaxError as error:
            name = error.name
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=name)]

    def read(self, tags: TagReader, tools: Sequence[ToolSchema]) -> CallAttempt:
        """Read the next call, with its span. Raises `TagSyntaxError` if something else comes."""
        tags.skip_blank()
        start = tags.position
        tags.expect(self.opening)
        call = self._read_rest(tags, tools)
        tags.expect(self.closing)
        return replace(call, span=(start, tags.position))

    def _read_rest(self, tags: TagReader, tools: Sequence[ToolSchema]) -> CallAttempt:
        """Read the name and the parameters."""
        name = self.unescape(tags.read_until_text(self.end_of_name).partition('"')[0]).strip()
        try:
            return self._read_parameters(name, tags, tools)
        except TagSyntaxError as error:
            error.name = name
            raise

    def _read_parameters(self, name: str, tags: TagReader, tools: Sequence[ToolSchema]) -> CallAttempt:
        texts: dict[str, str] = {}
        are_strings: dict[str, bool] = {}
        while tags.is_at(self.parameter):
            tags.expect(self.parameter)
            known = find_parameters(name, tools).get("properties") or ()
            written, _, attribute = tags.read_key(self.end_of_key, known).partition('" ')
            key = self.unescape(written)
            if key in texts:
                raise TagSyntaxError(f"{key} is given twice")
            if attribute in self.string_attributes:
                are_strings[key] = self.string_attributes[attribute]
            if self.quotes is not None and tags.is_just_at(self.quotes[0]):
                tags.expect(self.quotes[0])
                texts[key] = tags.read_until(self.quotes[1])
                are_strings[key] = True
            else:
                written = tags.read_until_before(self.end_of_parameter, (self.parameter, self.closing))
                texts[key] = tags.strip_value(written)
        if not name:
            return CallAttempt(status=ToolCallStatus.MISSING_NAME)
        arguments = convert_arguments(texts, name, tools, are_strings=are_strings, writes_python=self.writes_python)
        return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=arguments)


class KeyValueTags:
    """The tags of one call with keys and values in tags.

    `suffix` is part of each, and `end_of_name` stands after the name if it is not empty.
    """

    def __init__(self, suffix: str = "", *, end_of_name: str = "") -> None:
        self._end_of_name = end_of_name
        self._key, self._end_of_key = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self._value, self._end_of_value = f"<arg_value{suffix}>", f"</arg_value{suffix}>"

    @property
    def inner_delimiters(self) -> tuple[str, ...]:
        """All, for `Region.inner_delimiters`."""
        tags = (self._end_of_name, self._key, self._end_of_key, self._value, self._end_of_value)
        return tuple(tag for tag in tags if tag)

    def read(self, body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read a body of one call."""
        tags = TagReader(body)
        texts: dict[str, str] = {}
        name = ""
        try:
            name = (tags.read_until(self._end_of_name) if self._end_of_name else tags.read_until_next()).strip()
            while not tags.is_at_end():
                tags.expect(self._key)
                key = tags.read_until(self._end_of_key).strip()
                tags.expect(self._value)
                if key in texts:
                    raise TagSyntaxError(f"{key} is given twice")
                texts[key] = tags.strip_value(tags.read_until_before(self._end_of_value, (self._key,)))
        except TagSyntaxError:
            return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, name=name if _is_name(name) else "")]
        if not name:
            return [CallAttempt(status=ToolCallStatus.MISSING_NAME)]
        if not _is_name(name):
            return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
        return [CallAttempt(status=ToolCallStatus.OK, name=name, arguments=convert_arguments(texts, name, tools))]
