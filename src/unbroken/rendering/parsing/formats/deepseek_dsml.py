r"""DeepSeek V3.2 and V4: a section of calls between DSML tags, in which each value says whether it is a string.

<think>add them</think>Let me see.\n\n<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

V4's section is `<｜DSML｜tool_calls>`. Values other than strings are JSON.
"""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.tags import CallTags

_TAGS = CallTags(
    opening='<｜DSML｜invoke name="',
    end_of_name='">',
    closing="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="',
    end_of_key='">',
    end_of_parameter="</｜DSML｜parameter>",
    string_attributes={'string="true': True, 'string="false': False},
)


def _make_format(name: str, section: str) -> CallFormat:
    opening = f"<｜DSML｜{section}>"
    return CallFormat(
        name=name,
        regions=(
            reasoning_region(),
            call_region(opening, f"</｜DSML｜{section}>", _TAGS.read_section, inner_delimiters=_TAGS.inner_delimiters),
        ),
        hints=(opening,),
    )


DEEPSEEK_V32 = _make_format("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _make_format("deepseek_v4", "tool_calls")
