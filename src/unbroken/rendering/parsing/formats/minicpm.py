r"""MiniCPM5: each call is an element, and a string that may contain tags is in a CDATA section.

<think>\nadd them\n</think>\n\nLet me see.
<function name="add"><param name="a">1</param><param name="b"><![CDATA[a < b]]></param></function>
"""

from __future__ import annotations

from dataclasses import replace

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.tags import CallTags

_TAGS = CallTags(
    opening='<function name="',
    end_of_name='">',
    closing="</function>",
    parameter='<param name="',
    end_of_key='">',
    end_of_parameter="</param>",
    writes_python=True,
    quotes=("<![CDATA[", "]]></param>"),
)
_CALL = call_region(_TAGS.opening, _TAGS.closing, _TAGS.read_inside, inner_delimiters=_TAGS.inner_delimiters)

MINICPM5 = CallFormat(
    name="minicpm5",
    regions=(reasoning_region(), replace(_CALL, quotes=_TAGS.quotes)),
    hints=(_TAGS.opening, _TAGS.parameter),
)
