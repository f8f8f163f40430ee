r"""Reads calls as a name, keys and values between tags: `add<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n`."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt
from unbroken.rendering.parsing.syntax.arguments import convert_arguments
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError, is_name


class KeyValueTags:
    """The tags of one call; `suffix` is part of each, and `end_of_name` stands after the name if it is not empty."""

    def __init__(self, suffix: str = "", *, end_of_name: str = "") -> None:
        self._end_of_name = end_of_name
        self._key, self._end_of_key = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self._value, self._end_of_value = f"<arg_value{suffix}>", f"</arg_value{suffix}>"

    @property
    def inner_delimiters(self) -> tuple[str, ...]:
        """All, for `Region.inner_delimiters`."""
        tags = (self._end_of_name, self._key, self._end_of_key, self._value, self._end_of_value)
        return tuple(tag for tag in tags if tag)

    def read(self, body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
        """Read a body of one call."""
        tags = TagReader(body)
        texts: dict[str, str] = {}
        try:
            name = (tags.read_until(self._end_of_name) if self._end_of_name else tags.read_until_next()).strip()
            while not tags.is_at_end():
                tags.expect(self._key)
                key = tags.read_until(self._end_of_key).strip()
                tags.expect(self._value)
                if key in texts:
                    raise TagSyntaxError(f"{key} is given twice")
                texts[key] = tags.read_until_before(self._end_of_value, (self._key,))
        except TagSyntaxError:
            return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
        if not name:
            return [CallAttempt(status=ToolCallStatus.MISSING_NAME)]
        if not is_name(name):
            return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
        return [CallAttempt(status=ToolCallStatus.OK, name=name, arguments=convert_arguments(texts, name, tools))]
