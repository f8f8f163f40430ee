r"""GLM-4.5 and later: the name, then keys and values between tags.

<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>
"""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.tags import KeyValueTags

_TAGS = KeyValueTags()

GLM = CallFormat(
    name="glm",
    regions=(
        reasoning_region(),
        call_region("<tool_call>", "</tool_call>", _TAGS.read, inner_delimiters=_TAGS.inner_delimiters),
    ),
    hints=("<tool_call>", "<arg_key>", "<arg_value>"),
)
