"""What a parser of completions is.

There are two: `parser.FormatParser`, for which a format is data, and `response_template.ResponseTemplateParser`, for
which a tokenizer's own description of its format is.
"""

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

    @property
    def name(self) -> str:
        """What it is chosen by."""
        ...

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text ends inside reasoning."""
        ...

    def open_reader(self, *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()) -> ResponseReader:
        """A reader for one completion."""
        ...

    def parse(
        self, completion_ids: Iterable[int], *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a whole completion: start, feed everything, finish."""
        ...
