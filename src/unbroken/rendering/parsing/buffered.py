"""A reader for parsers of whole completions: it returns everything at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from unbroken.errors import InvariantError
from unbroken.rendering.base import Delta, ParsedResponse, PartKind


class BufferedReader:
    """Implements `ResponseReader`: collects the ids, and parses them when the completion ends."""

    def __init__(self, parse: Callable[[Sequence[int]], ParsedResponse]) -> None:
        self._parse = parse
        self._ids: list[int] = []
        self._response: ParsedResponse | None = None

    def feed(self, token_ids: Iterable[int], /) -> tuple[Delta, ...]:
        """Take more ids; returns nothing before the end."""
        if self._response is not None:
            raise InvariantError("the response was closed: open another reader for another completion")
        self._ids.extend(map(int, token_ids))
        return ()

    def close(self) -> tuple[Delta, ...]:
        """Return everything, reasoning and content before the calls; nothing when called again."""
        if self._response is not None:
            return ()
        parsed = self._response = self._parse(self._ids)
        texts = ((PartKind.REASONING, parsed.reasoning), (PartKind.CONTENT, parsed.content))
        return (
            *(Delta(kind=kind, text=text) for kind, text in texts if text),
            *(Delta(kind=PartKind.TOOL_CALL, tool_call=call) for call in parsed.tool_calls),
        )

    def finish(self) -> ParsedResponse:
        """Close the reader if needed, and return the whole response."""
        self.close()
        assert self._response is not None
        return self._response
