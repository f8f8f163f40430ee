r"""MiniMax: JSON objects on lines in M1, tags in M2. One pair of delimiters is around all calls.

M1  <tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "stop", "arguments": {}}\n</tool_calls>
M2  <minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>

Each call has its own span; the delimiters around all of them are markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import Body, CallAttempt, CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.invocations import InvocationTags
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader
from unbroken.rendering.parsing.syntax.tags import TagReader, TagSyntaxError

_TAGS = InvocationTags()


def _read(body: Body, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    tags = TagReader(body)
    attempts: list[CallAttempt] = []
    while not tags.is_at_end():
        start = tags.position
        try:
            attempts.append(_TAGS.read(tags, tools))
        except TagSyntaxError:
            # The beginning of the next call is unknown now.
            attempts.append(CallAttempt(status=ToolCallStatus.INVALID_SYNTAX, span=(start, len(body.text))))
            break
    return attempts


MINIMAX_M1 = CallFormat(
    name="minimax_m1",
    regions=(
        reasoning_region(),
        call_region("<tool_calls>", "</tool_calls>", make_json_calls_reader()),
    ),
    call_patterns=(r'<tool_calls>\s*\{\s*"name":\s*"probe_one"',),
    hints=("<tool_calls>", "</tool_calls>"),
)

MINIMAX_M2 = CallFormat(
    name="minimax_m2",
    regions=(
        reasoning_region(),
        call_region("<minimax:tool_call>", "</minimax:tool_call>", _read, inner_delimiters=_TAGS.inner_delimiters),
    ),
    call_patterns=(r'<minimax:tool_call>\s*<invoke name="probe_one">',),
    hints=("<minimax:tool_call>",),
)
