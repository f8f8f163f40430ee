r"""Qwen3-Coder, Qwen3.5 and later, and Nemotron 3; Seed-OSS with other tags.

QWEN3_CODER  <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
SEED         <seed:think>hm</seed:think>\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n
             </seed:tool_call>

In QWEN3_CODER, one newline before and after a value belongs to the format, unless the template writes none; other white
space belongs to the value. With the newline, a parameter whose name has a `>` in it is read if the tool has one of this
name, and is invalid syntax if that is in doubt. Seed-OSS writes lists and objects as Python does.
"""

from __future__ import annotations

from dataclasses import replace

from unbroken.rendering.parsing.call_format import CallFormat, call_region, reasoning_region
from unbroken.rendering.parsing.syntax.tags import CallTags

_TAGS = CallTags(
    opening="<function=",
    end_of_name=">",
    closing="</function>",
    parameter="<parameter=",
    end_of_key=">",
    end_of_parameter="</parameter>",
    unescape=str.strip,
)
_SEED_TAGS = replace(_TAGS, writes_python=True)

QWEN3_CODER = CallFormat(
    name="qwen3_coder",
    regions=(
        reasoning_region(),
        call_region("<tool_call>", "</tool_call>", _TAGS.read_single, inner_delimiters=_TAGS.inner_delimiters),
    ),
    value_ends=("\n", "\n"),
    hints=("<tool_call>", "<function=", "<parameter="),
)
SEED = CallFormat(
    name="seed",
    regions=(
        reasoning_region("<seed:think>", "</seed:think>"),
        call_region(
            "<seed:tool_call>",
            "</seed:tool_call>",
            _SEED_TAGS.read_single,
            inner_delimiters=_SEED_TAGS.inner_delimiters,
        ),
    ),
    hints=("<seed:tool_call>",),
)
