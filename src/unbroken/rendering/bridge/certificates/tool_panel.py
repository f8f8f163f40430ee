"""The panel of tools: if a bridge is the same with each of these sets, its certificate holds for other tools too.

Most templates write the tools into the first message and nowhere else. Then one certificate holds for every set, and
a set that comes later costs a few renderings instead of hundreds:

    examination   window, histories, turns, texts    with the tools of `PROBE_TOOLS`
                  window, two histories              with every set of the panel, and without tools
    a new set     window, four histories             with that set

A template whose text after the turn differs with the tools is examined for each set on its own. One that cannot write
anything of the tools there (`jinja.tool_effect`) is examined without tools, and one that can only see if there are any,
without and with one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.bridge.certificates.probe_window import ProbeWindow
from unbroken.rendering.bridge.histories.panel import HistoryPanel, build_history
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.message_format import PROBE_NAMES, PROBE_TOOLS

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")
_MAX_TOOLS = 200
_STEP = 5
"""Each set is tried after every fifth of the drawn histories."""
_LONG = "A probe with a long description. " * 100

SMALL_TOOLS: tuple[ToolSchema, ...] = (
    {
        "type": "function",
        "function": {
            "name": PROBE_NAMES[0],
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)
_NESTED_TOOLS: tuple[ToolSchema, ...] = (
    {
        "type": "function",
        "function": {
            "name": PROBE_NAMES[1],
            "description": _LONG,
            "parameters": {
                "type": "object",
                "properties": {
                    "mode": {"type": "string", "enum": ["one", "two"], "description": "A choice."},
                    "rows": {"type": "array", "items": {"type": "integer"}, "default": []},
                    "either": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "inner": {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]},
                },
                "required": ["mode", "inner"],
                "additionalProperties": False,
            },
        },
    },
)
_BARE_TOOLS: tuple[ToolSchema, ...] = ({"type": "function", "function": {"name": PROBE_NAMES[0]}},)


def build_tool_sets(literals: Sequence[str], integers: Sequence[int]) -> Iterator[tuple[ToolSchema, ...]]:
    """Build the sets: small, nested and bare tools, tools that spell the constants, and numbers of tools near them."""
    yield from (SMALL_TOOLS, PROBE_TOOLS[::-1], _NESTED_TOOLS, (*SMALL_TOOLS, *_NESTED_TOOLS), _BARE_TOOLS)
    names = [literal for literal in literals if _NAME.fullmatch(literal)]
    if names:
        yield tuple(_make_tool(name) for name in names)
        yield tuple(_make_tool(name) for name in reversed(names))
        yield from ((_make_tool(name),) for name in names)
    if literals:
        yield (_make_tool(PROBE_NAMES[0], "\n".join(literals)),)
    sizes = {8, 32, *(size for n in integers for size in (n - 1, n, n + 1) if 0 < size <= _MAX_TOOLS)}
    yield from (tuple(_make_tool(f"{PROBE_NAMES[0]}{k}") for k in range(size)) for size in sorted(sizes))


def depends_on_tools(
    window: ProbeWindow,
    panel: HistoryPanel,
    tool_sets: Sequence[Sequence[ToolSchema]],
    drawn: Sequence[Sequence[Message]],
) -> bool:
    """Whether the text after the turn changes without tools, or with one of the sets, if the template accepts it.

    No tools, and each set, are also tried after some of the `drawn` histories.
    """
    if not is_same_with_tools(window, (*panel.short_histories[1:2], panel.all_roles), (), drawn[::_STEP]):
        return True
    histories = (panel.short_histories[0], panel.all_roles)
    for number, tools in enumerate(tool_sets):
        try:
            other = window.change(tools=tools)
        except BridgeRefusedError:
            continue  # real tools like these are compared before they are used
        if not _is_same(window, other, histories, drawn[number % _STEP :: _STEP]):
            return True
    return False


def is_same_with_tools(
    window: ProbeWindow,
    histories: Sequence[str],
    tools: Sequence[ToolSchema],
    drawn: Iterable[Sequence[Message]] = (),
) -> bool:
    """Whether the text after the turn is the same with these tools, in the window and after each of the histories.

    `histories` are spellings, and `drawn` more histories.
    """
    try:
        other = window.change(tools=tools)
    except BridgeRefusedError:
        return False
    return _is_same(window, other, histories, drawn)


def _is_same(
    window: ProbeWindow, other: ProbeWindow, histories: Sequence[str], drawn: Iterable[Sequence[Message]]
) -> bool:
    """Whether `other`, which has other tools, has the same text after the turn, also after each of the histories."""
    if other.bridge_text != window.bridge_text:
        return False
    try:
        for spelling in dict.fromkeys(histories):
            other.check_conversation(build_history(spelling), other.turn, description=f"the history {spelling!r}")
        for history in drawn:
            other.check_conversation(history, other.turn, description="a random history")
    except BridgeRefusedError:
        return False
    return True


def _make_tool(name: str, description: str = "A probe.") -> ToolSchema:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": description}}},
        },
    }
