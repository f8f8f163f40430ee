r"""The form of GLM-4.5 and later: the name, then keys and values between tags.

<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.format import Attempt, Body, Format, Region, thinking
from unbroken.rendering.parsing.syntax.arguments import typed_arguments
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError, is_name

_KEY, _END_OF_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_OF_VALUE = "<arg_value>", "</arg_value>"


def _read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[Attempt]:
    tags = TagReader(body)
    texts: dict[str, str] = {}
    name = tags.until_next().strip()
    try:
        while not tags.is_at_end():
            tags.expect(_KEY)
            key = tags.until(_END_OF_KEY).strip()
            tags.expect(_VALUE)
            if key in texts:
                raise TagSyntaxError(f"{key} is given twice")
            texts[key] = tags.until(_END_OF_VALUE)
    except TagSyntaxError:
        return [Attempt(status=ToolCallStatus.INVALID_SYNTAX)]
    if not name:
        return [Attempt(status=ToolCallStatus.MISSING_NAME)]
    if not is_name(name):
        return [Attempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return [Attempt(status=ToolCallStatus.OK, name=name, arguments=typed_arguments(texts, name, tools))]


GLM = Format(
    name="glm",
    regions=(
        thinking(),
        Region(
            kind=PartKind.TOOL_CALL,
            opening="<tool_call>",
            closings=("</tool_call>",),
            ended_by=("<tool_call>",),
            inner=(_KEY, _END_OF_KEY, _VALUE, _END_OF_VALUE),
            read=_read,
        ),
    ),
    signs=(rf"<tool_call>\s*probe_one\s*{_KEY}",),
    hints=("<tool_call>", _KEY, _VALUE),
)
