r"""Call formats as data: how the models of a family write reasoning, answers and calls. One reader follows them all.

A turn is content, except for its regions:

    Let me see.\n<tool_call>\n{"name": "add"}\n</tool_call>
    `-content-´  `-------´`-----------------´`----------´
                  opening  the region's body   closing

A region begins with its opening, with the first text of the turn (Llama's `{`), or after a header (Harmony). The reader
finds a delimiter by id if it is a control token of the tokenizer, otherwise by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedToolCall, PartKind, ToolCallStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerDelimiter:
    """A delimiter inside a body, at the characters [start, stop) of its text."""

    delimiter: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBody:
    """The text between the delimiters of a region of calls, or of a header."""

    text: str
    inner_delimiters: tuple[InnerDelimiter, ...] = ()
    """Those that were found in the text, in order."""
    header: CallBody | None = None
    closing: str = ""
    """The delimiter that closed it, if it is a header."""
    value_ends: tuple[str, str] = ("", "")
    """`CallFormat.value_ends`."""

    def split(self) -> Iterator[tuple[str, str]]:
        """Split the text at its delimiters into pairs of a delimiter and the text after it; the first has no delimiter.

        `f<sep>{}` gives `("", "f"), ("<sep>", "{}")`.
        """
        delimiter, position = "", 0
        for inner in self.inner_delimiters:
            yield delimiter, self.text[position : inner.start]
            delimiter, position = inner.delimiter, inner.stop
        yield delimiter, self.text[position:]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAttempt:
    """One attempt at a call, as a `CallReader` returns it."""

    status: ToolCallStatus
    name: str = ""
    """Of a failed attempt too, where it could be read."""
    arguments: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""
    span: tuple[int, int] | None = None
    """Its characters in the body's text; None for the whole region, delimiters included."""

    def to_call(self, raw: str, span: tuple[int, int], *, full_text: str = "") -> ParsedToolCall:
        """The attempt with its text (with delimiters, `full_text`) and its range of completion ids."""
        return ParsedToolCall(
            raw=raw,
            status=self.status,
            span=span,
            name=self.name,
            arguments=self.arguments,
            call_id=self.call_id,
            full_text=full_text,
        )


CallReader: TypeAlias = Callable[[CallBody, Sequence[ToolSchema]], Sequence[CallAttempt]]
"""Reads the body of a region as attempts at calls. Must not raise. Without attempts the region is markup, or content if
it has `starts_with`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a turn that is not plain content."""

    kind: PartKind
    """REASONING, CONTENT or TOOL_CALL."""
    opening: str = ""
    """Opens the region anywhere in the content. Empty if only `starts_with` or a header opens it."""
    starts_with: str = ""
    """Opens the region at the beginning of an answer; it is part of the body."""
    closings: tuple[str, ...] = ()
    """Any of these closes it; without closings, `ended_by` or the end of the turn does."""
    ended_by: tuple[str, ...] = ()
    """These also end it, but belong to what follows. A region with closings is then unclosed."""
    inner_delimiters: tuple[str, ...] = ()
    """In the body, for `read_calls`."""
    read_calls: CallReader | None = None
    """Required for TOOL_CALL."""
    once: bool = False
    """Opens at most once in a turn, before any call. Elsewhere its delimiters are text."""
    closes_alone: bool = False
    """At the beginning of a turn, its closing without its opening is an empty region. Only for REASONING."""
    keeps_white_space: bool = False
    """White space next to the delimiters belongs to the text. Not for TOOL_CALL."""
    quotes: tuple[str, str] | None = None
    """Between these two inner delimiters, all others are text. Only for TOOL_CALL."""

    @property
    def is_plain(self) -> bool:
        """Whether it is content that other regions and headers may interrupt, as without any region."""
        return self.kind is PartKind.CONTENT and not (self.closings or self.ended_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A text that decides which region follows it.

    `<|channel|>final<|message|>` is closed by `<|message|>`, and `<|channel|>` is an inner delimiter. A header that is
    not closed, because a region or another header opens or the completion ends, is markup if it has an opening or an
    inner delimiter, and content if not.
    """

    closings: tuple[str, ...]
    """Any of these closes it; `CallBody.closing` says which."""
    route: Callable[[CallBody], Region | None]
    """Returns the next region, or None if the text is content and not a header."""
    opening: str = ""
    """Empty if everything outside a region is a header."""
    inner_delimiters: tuple[str, ...] = ()
    is_opened_by_prompt: bool = False
    """The generation prompt ends with the opening."""
    is_content_if_unclosed: bool = False
    """A header with an opening that is not closed is content, because its opening is ordinary text."""

    def without_calls(self) -> Header:
        """The header with messages of content in place of calls."""
        return replace(self, route=lambda body: _as_content(self.route(body)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The call format of a family of models."""

    name: str
    regions: tuple[Region, ...]
    """Includes those after a header."""
    separators: tuple[str, ...] = ()
    """Delimiters between regions without a meaning (around a section of calls)."""
    message_separators: tuple[str, ...] = ()
    """Like `separators`, but also in a turn that can have no calls."""
    header: Header | None = None
    hints: tuple[str, ...] = ()
    """Texts that are all in the source of a template for these models, if no format reads back calls it renders."""

    value_ends: tuple[str, str] = ("", "")
    r"""What the template writes before and after an argument between tags, `<parameter=a>\n1\n</parameter>`, and is no
    part of its value. Detection reads it off the template."""

    @property
    def reasoning(self) -> Region | None:
        """The region of reasoning, which the prompt may have opened already."""
        return next((region for region in self.regions if region.kind is PartKind.REASONING), None)

    @property
    def delimiters(self) -> frozenset[str]:
        """All texts that the reader looks for."""
        found = {*self.separators, *self.message_separators}
        for region in self.regions:
            found |= {region.opening, *region.closings, *region.ended_by, *region.inner_delimiters}
        if self.header is not None:
            found |= {self.header.opening, *self.header.closings, *self.header.inner_delimiters}
        return frozenset(found - {""})

    def without_calls(self) -> CallFormat:
        """The format of a turn that can have no calls: their delimiters are text like any other."""
        return replace(
            self,
            regions=tuple(region for region in self.regions if region.kind is not PartKind.TOOL_CALL),
            separators=(),
            header=None if self.header is None else self.header.without_calls(),
        )

    def with_reasoning(self, opening: str, closing: str) -> CallFormat:
        """The format with these delimiters of reasoning, unless headers open its reasoning."""
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


def _as_content(region: Region | None) -> Region | None:
    if region is None or region.kind is not PartKind.TOOL_CALL:
        return region
    return Region(kind=PartKind.CONTENT, closings=region.closings, ended_by=region.ended_by, keeps_white_space=True)


def reasoning_region(opening: str = "<think>", closing: str = "</think>") -> Region:
    """The region of reasoning in most formats: once, before the answer."""
    return Region(kind=PartKind.REASONING, opening=opening, closings=(closing,), once=True)


def call_region(
    opening: str,
    closing: str,
    read_calls: CallReader,
    *,
    ended_by: tuple[str, ...] = (),
    inner_delimiters: tuple[str, ...] = (),
) -> Region:
    """A region of calls between two delimiters. Another opening or `ended_by` leaves it unclosed."""
    return Region(
        kind=PartKind.TOOL_CALL,
        opening=opening,
        closings=(closing,),
        ended_by=(opening, *ended_by),
        inner_delimiters=inner_delimiters,
        read_calls=read_calls,
    )
