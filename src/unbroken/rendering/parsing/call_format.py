r"""The vocabulary of formats: what a model writes around reasoning, answers and calls, as data that one reader follows.

A turn is content, but for its regions:

    Let me see.\n<tool_call>\n{"name": "add"}\n</tool_call>
    `-content-´  `-------´`-----------------´`----------´
                  opening  the region's body   closing

A region opens with its opening, with what stands first in the turn (Llama's `{`), or behind a header (Harmony). The
reader matches each delimiter by id where the tokenizer has it as a control token, and by its text where it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerDelimiter:
    """A delimiter inside a body, at these characters of its text."""

    delimiter: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What stands between the delimiters of a call's region, or of a header."""

    text: str
    marks: tuple[InnerDelimiter, ...] = ()
    """The region's `inner` delimiters that were found in it, in order."""
    header: Body | None = None
    """The header that led here."""

    def pieces(self) -> Iterator[tuple[str, str]]:
        """The delimiters with the text behind each; the first pair has no delimiter.

        `f<sep>{}` with the mark `<sep>` gives `("", "f"), ("<sep>", "{}")`.
        """
        delimiter, position = "", 0
        for mark in self.marks:
            yield delimiter, self.text[position : mark.start]
            delimiter, position = mark.delimiter, mark.stop
        yield delimiter, self.text[position:]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAttempt:
    """One attempt at a call, as a format reads it."""

    status: ToolCallStatus
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""
    span: tuple[int, int] | None = None
    """Its characters in the body's text; None: all of the region, delimiters included."""


CallReader: TypeAlias = Callable[[Body, Sequence[ToolSchema]], Sequence[CallAttempt]]
"""Reads a region's body as attempts at calls. Must not raise. None found: the region is markup, or, where it began with
the turn's first character, content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A stretch of a turn with a meaning of its own."""

    kind: PartKind
    """REASONING, CONTENT or TOOL_CALL."""
    opening: str = ""
    """Opens it anywhere in the content. Empty: only `first` or a header does."""
    starts_with: str = ""
    """In place of an opening: opens it where the turn's answer begins with this text, which is part of the body."""
    closings: tuple[str, ...] = ()
    """Any of these closes it. None: the end of the turn does, or what `ended_by` says."""
    ended_by: tuple[str, ...] = ()
    """Delimiters that end it too, but belong to what follows. A region with closings is then unclosed."""
    inner_delimiters: tuple[str, ...] = ()
    """Delimiters inside a call's body that `read` is told about."""
    read: CallReader | None = None
    """For TOOL_CALL."""
    once: bool = False
    """Opens once in a turn at most, and before any call: elsewhere its delimiters are text."""
    keeps_white_space: bool = False
    """Text only: white space beside the delimiters belongs to the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Text whose wording decides which region follows it.

    `<|channel|>final<|message|>`: closed by `<|message|>`, and its `<|channel|>` is an inner delimiter. One that is not
    closed, because a region or another header opens or the completion ends, is markup if it has a delimiter of its own,
    else content.
    """

    closing: str
    route: Callable[[Body], Region | None]
    """The region that follows; None: it was no header, but content."""
    opening: str = ""
    """Empty: whatever stands outside a region is a header."""
    inner_delimiters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How the models of a family write reasoning and calls."""

    name: str
    regions: tuple[Region, ...]
    """Those that `header` leads to as well."""
    separators: tuple[str, ...] = ()
    """Delimiters between regions that mean nothing by themselves (the brackets around a section of calls)."""
    header: Header | None = None
    call_patterns: tuple[str, ...] = ()
    """Regular expressions: one of them is found in a call that a template of this format renders. The function is
    named `probe_one`."""
    hints: tuple[str, ...] = ()
    """Weaker evidence: texts that are all in a call that a template renders, or in its source if it renders none."""

    @property
    def reasoning(self) -> Region | None:
        """The region that a prompt may have opened already."""
        return next((region for region in self.regions if region.kind is PartKind.REASONING), None)

    @property
    def delimiters(self) -> frozenset[str]:
        """All texts that the reader has to look for."""
        found = {*self.separators}
        for region in self.regions:
            found |= {region.opening, *region.closings, *region.ended_by, *region.inner_delimiters}
        if self.header is not None:
            found |= {self.header.opening, self.header.closing, *self.header.inner_delimiters}
        return frozenset(found - {""})

    def with_reasoning(self, opening: str, closing: str) -> CallFormat:
        """The same format with these delimiters of reasoning, unless it is headers that tell reasoning."""
        region = self.reasoning
        if region is None and self.header is None:
            return replace(self, regions=(reasoning_region(opening, closing), *self.regions))
        if region is None or not region.opening:
            return self
        other = replace(region, opening=opening, closings=(closing,))
        return replace(self, regions=tuple(other if known is region else known for known in self.regions))

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text ends inside reasoning."""
        region = self.reasoning
        if region is None or not region.opening:
            return False
        return prompt_end.rfind(region.opening) > max(map(prompt_end.rfind, region.closings))


def reasoning_region(opening: str = "<think>", closing: str = "</think>") -> Region:
    """The region of reasoning that most formats have: once, before the answer."""
    return Region(kind=PartKind.REASONING, opening=opening, closings=(closing,), once=True)
