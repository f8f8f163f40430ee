r"""Reads one call between tags, as MiniMax M2 and Muse write it; Muse's tags have the prefix `atem:`.

    <invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">two</parameter>\n</invoke>

All white space inside a parameter belongs to its value.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt
from unbroken.rendering.parsing.syntax.arguments import convert_arguments
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError


class InvocationTags:
    """The tags of one call."""

    def __init__(self, prefix: str = "") -> None:
        self.opening = f'<{prefix}invoke name="'
        self._closing = f"</{prefix}invoke>"
        self._parameter = f'<{prefix}parameter name="'
        self._end_of_parameter = f"</{prefix}parameter>"

    @property
    def inner_delimiters(self) -> tuple[str, ...]:
        """All, for `Region.inner_delimiters`."""
        return self.opening, self._closing, self._parameter, self._end_of_parameter

    def read(self, tags: TagReader, tools: Sequence[ToolSchema]) -> CallAttempt:
        """Read the next call, with its span. Raises `TagSyntaxError` if something else comes."""
        tags.skip_blank()
        start = tags.position
        tags.expect(self.opening)
        name = tags.read_until_text('">').strip()
        texts: dict[str, str] = {}
        while tags.is_at(self._parameter):
            tags.expect(self._parameter)
            key = tags.read_until_text('">')
            if key in texts:
                raise TagSyntaxError(f"{key} is given twice")
            texts[key] = tags.read_until(self._end_of_parameter)
        tags.expect(self._closing)
        span = (start, tags.position)
        if not name:
            return CallAttempt(status=ToolCallStatus.MISSING_NAME, span=span)
        return CallAttempt(
            status=ToolCallStatus.OK, name=name, arguments=convert_arguments(texts, name, tools), span=span
        )
