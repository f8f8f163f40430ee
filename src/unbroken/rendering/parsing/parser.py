"""The parser of a call format: it opens a reader for each completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedResponse, ResponseReader
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.id_stream import CompletionTokens, Delimiters, IdStream
from unbroken.rendering.parsing.reader import FormatReader


class ResponseParser(Protocol):
    """Reads the ids of a completion, stop ids included, as an assistant turn.

    Never raises, for any ids that the model sampled: control ids anywhere, ids that are not UTF-8, no ids at all.
    `reasoning_opened` means that the prompt ended inside reasoning.
    """

    @property
    def name(self) -> str:
        """The name for `choose_parser`."""
        ...

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text ends inside reasoning."""
        ...

    def open_reader(
        self, *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> ResponseReader:
        """Open a reader for one completion; without `reads_calls`, the text of calls is content."""
        ...

    def parse(
        self, completion_ids: Iterable[int], *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Open a reader, feed the whole completion, finish."""
        ...


class FormatParser:
    """Implements `ResponseParser`. It keeps no state of completions, only the text of each id so far."""

    def __init__(self, call_format: CallFormat, tokens: CompletionTokens) -> None:
        self.call_format = call_format
        self._tokens = tokens
        self._delimiters = Delimiters(call_format.delimiters, control=tokens.control)
        self._plain_format = call_format.without_calls()
        self._plain_delimiters = Delimiters(self._plain_format.delimiters, control=tokens.control)

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.call_format.name

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text ends inside reasoning."""
        return self.call_format.opens_reasoning(prompt_end)

    def open_reader(
        self, *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> FormatReader:
        """Open a reader for one completion; see `ResponseParser`."""
        call_format, delimiters = (
            (self.call_format, self._delimiters) if reads_calls else (self._plain_format, self._plain_delimiters)
        )
        stream = IdStream(self._tokens, delimiters)
        return FormatReader(call_format, stream, exact=delimiters.exact, reasoning_opened=reasoning_opened, tools=tools)

    def parse(
        self, completion_ids: Iterable[int], *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a whole completion; see `ResponseParser`."""
        reader = self.open_reader(reasoning_opened=reasoning_opened, tools=tools)
        reader.feed(completion_ids)
        return reader.finish()
