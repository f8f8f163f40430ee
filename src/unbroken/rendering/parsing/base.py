"""What a parser of completions is: one small file per format implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unbroken.rendering.base import ParsedResponse


class ResponseParser(Protocol):
    """Reads the ids of a completion as an assistant turn."""

    def parse(self, completion_ids: Sequence[int], *, reasoning_opened: bool) -> ParsedResponse:
        """Never raises for what a model may sample: control ids anywhere, ids that spell no UTF-8, nothing at all.

        `completion_ids` come without the stop id; `reasoning_opened` says that the prompt ended inside reasoning.
        """
        ...
