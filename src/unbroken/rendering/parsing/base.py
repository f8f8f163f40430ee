"""The protocol of parsers of completions, implemented by `FormatParser` and `ResponseTemplateParser`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedResponse, ResponseReader


class ResponseParser(Protocol):
    """Reads the ids of a completion, stop ids included, as an assistant turn.

    Never raises, whatever the model sampled: control ids anywhere, ids that are not UTF-8, no ids at all.
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
