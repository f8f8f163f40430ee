r"""Reads calls with each argument between tags. Families differ in their tags only.

    <invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">two</parameter>\n</invoke>
    <function=add>\n<parameter=a>\n1\n</parameter>\n</function>

All white space inside a parameter belongs to its value, unless the family writes a newline on both sides of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt
from unbroken.rendering.parsing.syntax.arguments import convert_arguments, find_parameters
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The tags of one call."""

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
    strips_newline: bool = False
    """One newline before and after a value belongs to the format."""
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

    def read_section(self, body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read a body of several calls, each with its span."""
        tags = TagReader(body)
        attempts: list[CallAttempt] = []
        while not tags.is_at_end():
            start = tags.position
            try:
                attempts.append(self.read(tags, tools))
            except TagSyntaxError:
                # The beginning of the next call is unknown now.
                attempts.append(CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, span=(start, len(body.text))))
                break
        return attempts

    def read_single(self, body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read a body of one call."""
        tags = TagReader(body)
        try:
            call = self.read(tags, tools)
            if tags.is_at_end():
                return [replace(call, span=None)]
        except TagSyntaxError:
            pass
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]

    def read_inside(self, body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read the body of a region that `opening` opened and `closing` closed."""
        tags = TagReader(body)
        try:
            call = self._read_rest(tags, tools)
            if tags.is_at_end():
                return [call]
        except TagSyntaxError:
            pass
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]

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
        texts: dict[str, str] = {}
        are_strings: dict[str, bool] = {}
        while tags.is_at(self.parameter):
            tags.expect(self.parameter)
            written, _, attribute = self._read_key(tags, name, tools).partition('" ')
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
                texts[key] = self._strip(tags.read_until_before(self.end_of_parameter, (self.parameter, self.closing)))
        if not name:
            return CallAttempt(status=ToolCallStatus.MISSING_NAME)
        arguments = convert_arguments(texts, name, tools, are_strings=are_strings, writes_python=self.writes_python)
        return CallAttempt(status=ToolCallStatus.OK, name=name, arguments=arguments)

    def _read_key(self, tags: TagReader, name: str, tools: Sequence[ToolSchema]) -> str:
        if not self.strips_newline:
            return tags.read_until_text(self.end_of_key)
        return tags.read_key(self.end_of_key, find_parameters(name, tools).get("properties") or ())

    def _strip(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.strips_newline else value
