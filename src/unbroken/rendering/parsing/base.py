"""What a parser of completions is. `parser.FormatParser` is the one there is: a format is data for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedResponse, ResponseReader


class ResponseParser(Protocol):
    """Reads the ids of a completion, stop ids included, as an assistant turn.

    Never raises for what a model may sample: control ids anywhere, ids that spell no UTF-8, nothing at all.
    `reasoning_opened` says that the prompt ended inside reasoning.
    """

    def start(self, *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()) -> ResponseReader:
        """A reader for one completion."""
        ...

    def parse(
        self, completion_ids: Iterable[int], *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a whole completion: start, feed everything, finish."""
        ...
