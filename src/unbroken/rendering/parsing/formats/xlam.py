r"""xLAM: a JSON list of calls that is the whole turn, or in a code fence.

    [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]<|eot_id|>
     `------------- one call -------------´  `----------- another ----------´

A turn that begins with a bracket but has no call in its list is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Region
from unbroken.rendering.parsing.syntax.json_calls import make_json_calls_reader

_LOOKS_LIKE_CALL = re.compile(r'\s*\[\s*\{\s*"name"\s*:')
_read_calls = make_json_calls_reader()


def _read(body: CallBody, tools: Sequence[ToolSchema]) -> Sequence[CallAttempt]:
    attempts = _read_calls(body, tools)
    is_call = any(attempt.status is ToolCallStatus.OK for attempt in attempts) or _LOOKS_LIKE_CALL.match(body.text)
    return attempts if is_call else ()


XLAM = CallFormat(
    name="xlam",
    regions=(Region(kind=PartKind.TOOL_CALL, starts_with="[", read_calls=_read),),
    hints=("a single JSON array",),
)
