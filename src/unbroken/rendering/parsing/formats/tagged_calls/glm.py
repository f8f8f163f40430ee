r"""GLM-4.5 and later: the name, then keys and values between tags.

<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.arguments import convert_arguments
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError, is_name

_KEY, _END_OF_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_OF_VALUE = "<arg_value>", "</arg_value>"


def _read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    tags = TagReader(body)
    texts: dict[str, str] = {}
    name = tags.read_until_next().strip()
    try:
        while not tags.is_at_end():
            tags.expect(_KEY)
            key = tags.read_until(_END_OF_KEY).strip()
            tags.expect(_VALUE)
            if key in texts:
                raise TagSyntaxError(f"{key} is given twice")
            texts[key] = tags.read_until(_END_OF_VALUE)
    except TagSyntaxError:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    if not name:
        return [CallAttempt(status=ToolCallStatus.MISSING_NAME)]
    if not is_name(name):
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    return [CallAttempt(status=ToolCallStatus.OK, name=name, arguments=convert_arguments(texts, name, tools))]


GLM = CallFormat(
    name="glm",
    regions=(
        reasoning_region(),
        call_region("<tool_call>", "</tool_call>", _read, inner_delimiters=(_KEY, _END_OF_KEY, _VALUE, _END_OF_VALUE)),
    ),
    call_patterns=(rf"<tool_call>\s*probe_one\s*{_KEY}",),
    hints=("<tool_call>", _KEY, _VALUE),
)
