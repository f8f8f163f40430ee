r"""MiniMax: JSON objects on lines in M1, tags in M2. One pair of delimiters is around all calls.

M1  <tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "stop", "arguments": {}}\n</tool_calls>
M2  <minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>

Each call has its own span; the delimiters around all of them are markup. M3 is in `minimax_m3`.
"""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader
from unbroken.rendering.parsing.syntax.tags import CallTags

_TAGS = CallTags(
    opening='<invoke name="',
    end_of_name='">',
    closing="</invoke>",
    parameter='<parameter name="',
    end_of_key='">',
    end_of_parameter="</parameter>",
)

MINIMAX_M1 = CallFormat(
    name="minimax_m1",
    regions=(reasoning_region(), call_region("<tool_calls>", "</tool_calls>", make_json_calls_reader())),
    hints=("<tool_calls>", "</tool_calls>"),
)

MINIMAX_M2 = CallFormat(
    name="minimax_m2",
    regions=(
        reasoning_region(),
        call_region(
            "<minimax:tool_call>", "</minimax:tool_call>", _TAGS.read_section, inner_delimiters=_TAGS.inner_delimiters
        ),
    ),
    hints=("<minimax:tool_call>",),
)
