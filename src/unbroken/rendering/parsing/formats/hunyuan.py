r"""Hunyuan 3 (Hy3): GLM's keys and values, with a suffix in each tag, and in a section.

<think:opensource>add them</think:opensource>Let me see.<tool_calls:opensource>
<tool_call:opensource>add<tool_sep:opensource>
<arg_key:opensource>a</arg_key:opensource>
<arg_value:opensource>1</arg_value:opensource>
</tool_call:opensource>
</tool_calls:opensource>
"""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.tags import KeyValueTags

_SUFFIX = ":opensource"
_END_OF_SECTION = f"</tool_calls{_SUFFIX}>"
_TAGS = KeyValueTags(_SUFFIX, end_of_name=f"<tool_sep{_SUFFIX}>")

HUNYUAN3 = CallFormat(
    name="hunyuan3",
    regions=(
        reasoning_region(f"<think{_SUFFIX}>", f"</think{_SUFFIX}>"),
        call_region(
            f"<tool_call{_SUFFIX}>",
            f"</tool_call{_SUFFIX}>",
            _TAGS.read,
            ended_by=(_END_OF_SECTION,),
            inner_delimiters=_TAGS.inner_delimiters,
        ),
    ),
    separators=(f"<tool_calls{_SUFFIX}>", _END_OF_SECTION),
    hints=(f"<tool_sep{_SUFFIX}>",),
)
