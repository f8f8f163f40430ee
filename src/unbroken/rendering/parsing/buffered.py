"""A reader for parsers that only read whole completions: it gives everything at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from unbroken.errors import InvariantError
from unbroken.rendering.base import Delta, ParsedResponse, PartKind


class BufferedReader:
    """Implements `ResponseReader`: collects the ids, and parses them when the completion is over."""

    def __init__(self, parse: Callable[[Sequence[int]], ParsedResponse]) -> None:
        self._parse = parse
        self._ids: list[int] = []
        self._response: ParsedResponse | None = None

    def feed(self, token_ids: Iterable[int], /) -> tuple[Delta, ...]:
        """Nothing: it is not known yet what the ids are."""
        if self._response is not None:
            raise InvariantError("the response was closed: start another reader for another completion")
        self._ids.extend(map(int, token_ids))
        return ()

    def close(self) -> tuple[Delta, ...]:
        """Everything, reasoning and content before the calls; nothing when asked again."""
        if self._response is not None:
            return ()
        parsed = self._response = self._parse(self._ids)
        texts = ((PartKind.REASONING, parsed.reasoning), (PartKind.CONTENT, parsed.content))
        return (
            *(Delta(kind=kind, text=text) for kind, text in texts if text),
            *(Delta(kind=PartKind.TOOL_CALL, tool_call=call) for call in parsed.tool_calls),
        )

    def finish(self) -> ParsedResponse:
        """All that was read."""
        self.close()
        assert self._response is not None
        return self._response
