r"""Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: each argument between tags.

<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>

One newline before and after a value belongs to the format, other white space to the value. Everything up to the next
`</parameter>` is text.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.arguments import convert_arguments
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError

_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"


def _read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    tags = TagReader(body)
    texts: dict[str, str] = {}
    try:
        tags.expect(_FUNCTION)
        name = tags.read_until_text(">").strip()
        while tags.is_at(_PARAMETER):
            tags.expect(_PARAMETER)
            key = tags.read_until_text(">").strip()
            if key in texts:
                raise TagSyntaxError(f"{key} is given twice")
            texts[key] = tags.read_until(_END_OF_PARAMETER).removeprefix("\n").removesuffix("\n")
        tags.expect(_END_OF_FUNCTION)
    except TagSyntaxError:
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    if not tags.is_at_end():
        return [CallAttempt(status=ToolCallStatus.INVALID_SYNTAX)]
    if not name:
        return [CallAttempt(status=ToolCallStatus.MISSING_NAME)]
    return [CallAttempt(status=ToolCallStatus.OK, name=name, arguments=convert_arguments(texts, name, tools))]


QWEN3_CODER = CallFormat(
    name="qwen3_coder",
    regions=(
        reasoning_region(),
        call_region(
            "<tool_call>",
            "</tool_call>",
            _read,
            inner_delimiters=(_FUNCTION, _END_OF_FUNCTION, _PARAMETER, _END_OF_PARAMETER),
        ),
    ),
    call_patterns=(r"<tool_call>\s*<function=probe_one>",),
    hints=("<tool_call>", _FUNCTION, _PARAMETER),
)
