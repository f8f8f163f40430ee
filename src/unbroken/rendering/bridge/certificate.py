"""The certificate: evidence, once per shape, that the text of a bridge is the same after every history.

The window and a panel of synthetic histories are rendered with sentinels for all text. The text after the turn's end
must be byte-identical in all of them, and contain each new message once and in order (P1). The template's string
constants are tried as texts of every role, and the turn is tried empty, short and long, with no arguments and with
many. The certificate also says whether the template would keep everything before (P2). It is evidence and no proof: a
template that depends on something outside the panel passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.messages import Message, ToolSchema, get_reasoning
from unbroken.rendering.base import HistoryEffect, Refusal, RefusalReason
from unbroken.rendering.bridge.constants import MAX_CONSTANTS, ConstantsCheck
from unbroken.rendering.bridge.history_effect import HistoryEffectProbe
from unbroken.rendering.bridge.panel import HistoryClass, HistoryPanel, build_history
from unbroken.rendering.bridge.probe_window import ProbeWindow
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import CALL_ID_PREFIX, BridgeShape, ShapeExample
from unbroken.rendering.bridge.tool_panel import SMALL_TOOLS, depends_on_tools, is_same_with_tools
from unbroken.rendering.bridge.window import TURN_ARGUMENT, TURN_KEY, TextKind, WindowRenderer, WindowTurn
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import PROBE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result for one shape and one class of histories."""

    history_class: HistoryClass
    shows_text: bool
    """Whether the template renders text beside calls."""
    needs_tools: bool
    """Whether the tool schemas reach the bridge; without them the window is much cheaper to render."""
    needs_unique_ids: bool
    """Whether the template looks up calls by id in the whole conversation."""
    history: HistoryEffect
    """P2, over the panel, after a turn without reasoning."""
    history_with_reasoning: HistoryEffect
    """P2 after a turn with reasoning."""

    def get_effect(self, turn: Message) -> HistoryEffect:
        """P2 after this turn."""
        return self.history_with_reasoning if get_reasoning(turn) else self.history


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRecord:
    """One examination of a shape, with its cost."""

    shape: BridgeShape
    history_class: HistoryClass
    num_tools: int | None
    """How many tools it was examined with; None if it may hold for any tools."""
    outcome: Certificate | Refusal
    num_renderings: int
    duration_s: float


class Certifier:
    """Examines shapes for one template; `reasoning` are the texts that open and close its reasoning."""

    def __init__(self, template: ChatTemplate, windows: WindowRenderer, reasoning: tuple[str, str]) -> None:
        self._windows = windows
        self._renders_reasoning = windows.message_format.reasoning_key is not None
        self._integers = template.integers()
        self._literals = template.literals()
        self._reads_tools = "tools" in template.find_variables()
        self._effects = HistoryEffectProbe(windows.message_format, reasoning)

    def examine(
        self,
        shape: BridgeShape,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass = HistoryClass.ANY,
        *,
        for_any_tools: bool = False,
    ) -> CertificateRecord:
        """Compare the window of a shape with the panel of a class of histories.

        With `for_any_tools`, `tools` are an example: if no tools of their panel change the bridge, `needs_tools` is
        False, and the certificate holds for all tools for which `holds_for_tools` is true.
        """
        num_before, start = self._windows.num_renderings, time.perf_counter()
        outcome: Certificate | Refusal
        try:
            outcome = self._certify(shape, tools, history_class, for_any_tools=for_any_tools)
        except BridgeRefusedError as error:
            outcome = error.refusal
        return CertificateRecord(
            shape=shape,
            history_class=history_class,
            num_tools=None if for_any_tools else len(tools),
            outcome=outcome,
            num_renderings=self._windows.num_renderings - num_before,
            duration_s=time.perf_counter() - start,
        )

    def holds_for_tools(self, shape: BridgeShape, tools: Sequence[ToolSchema], history_class: HistoryClass) -> bool:
        """Whether these tools change nothing in a bridge that was certified without need of tools."""
        panel = self._build_panel(history_class)
        try:
            window = ProbeWindow(self._windows, ShapeExample.build(shape), tools=(), history_class=history_class)
        except BridgeRefusedError:
            return False
        return is_same_with_tools(window, (*panel.short_histories, panel.long_history), tools)

    def _certify(
        self, shape: BridgeShape, tools: Sequence[ToolSchema], history_class: HistoryClass, *, for_any_tools: bool
    ) -> Certificate:
        if len(self._literals) + len(self._integers) > MAX_CONSTANTS:
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED,
                f"the template has {len(self._literals)} texts and {len(self._integers)} numbers that it may compare "
                f"with, at most {MAX_CONSTANTS} are supported",
            )
        panel = self._build_panel(history_class)
        window = ProbeWindow(self._windows, ShapeExample.build(shape), tools=tools, history_class=history_class)
        window.check_new_messages()
        self._check_histories(window, panel)
        small = _try_small_tools(window, tools)
        self._check_turns(small, panel)
        ConstantsCheck(small, panel, self._literals).check(shape)
        return Certificate(
            history_class=history_class,
            shows_text=window.shows_text,
            needs_tools=self._depends_on_tools(window, panel)
            if for_any_tools
            else not is_same_with_tools(window, (), ()),
            needs_unique_ids=self._looks_up_ids(window),
            history=self._effects.find_effect(small, panel, turn_reasons=False),
            history_with_reasoning=self._effects.find_effect(small, panel, turn_reasons=True),
        )

    def _build_panel(self, history_class: HistoryClass) -> HistoryPanel:
        return HistoryPanel(
            renders_calls=self._windows.message_format.renders_calls,
            integers=self._integers,
            history_class=history_class,
            with_images=self._windows.placeholder is not None,
        )

    def _depends_on_tools(self, window: ProbeWindow, panel: HistoryPanel) -> bool:
        return self._reads_tools and depends_on_tools(window, panel, self._literals, self._integers)

    def _check_histories(self, window: ProbeWindow, panel: HistoryPanel) -> None:
        turns = [window.turn]
        if self._renders_reasoning:
            turns.append(window.example.turn.build_message(with_reasoning=True))
        num_rendered = 0
        for spelling in panel.histories():
            history = _build_history(spelling, panel)
            for turn in turns:
                num_rendered += window.check_conversation(history, turn, description=f"the history {spelling!r}")
        if num_rendered == 0:
            raise BridgeRefusedError(
                RefusalReason.TEMPLATE_RAISES, "the template refuses this turn after every history"
            )
        for spelling in panel.histories_near_constants():
            history = _build_history(spelling, panel)
            window.check_conversation(history, window.turn, description=f"{len(spelling)} messages")

    def _check_turns(self, window: ProbeWindow, panel: HistoryPanel) -> None:
        turn = window.example.turn
        turns = [turn.build_message(text=text) for text in _texts_of_turn(turn, panel)]
        turns += [turn.build_message(arguments=arguments) for arguments in _arguments_of_turn(len(turn.calls))]
        for spelling in panel.short_histories:
            history = _build_history(spelling, panel)
            window.check_turns(history, turns, window.count_turn_ends(history))
            if self._renders_reasoning and turn.text is TextKind.EMPTY and not turn.calls:
                usual = turn.build_message(with_reasoning=True)
                window.check_turns(history, [{**usual, "content": ""}], window.count_turn_ends(history, usual))

    def _looks_up_ids(self, window: ProbeWindow) -> bool:
        """Whether an earlier call with the same id and another name changes the text after the turn."""
        num_calls = len(window.example.turn.calls)
        if not num_calls:
            return False
        spelling = "u" + "ct" * (num_calls + 1) + "au"
        history = build_history(spelling, call_id_prefix=CALL_ID_PREFIX, names=PROBE_NAMES[::-1])
        try:
            window.check_conversation(history, window.turn, description="reused ids")
        except BridgeRefusedError:
            return True
        return False


def _build_history(spelling: str, panel: HistoryPanel) -> list[Message]:
    return build_history(spelling, long_text=panel.long_text)


def _try_small_tools(window: ProbeWindow, tools: Sequence[ToolSchema]) -> ProbeWindow:
    """The window with one small tool, which is much cheaper, if that does not change the text after the turn."""
    if not tools:
        return window
    try:
        small = window.change(tools=SMALL_TOOLS)
    except BridgeRefusedError:
        return window
    return small if small.bridge_text == window.bridge_text else window


def _texts_of_turn(turn: WindowTurn, panel: HistoryPanel) -> Iterator[str]:
    if turn.text is TextKind.WORDS:
        yield from panel.texts_near_constants()
    elif turn.text is TextKind.BLANK:
        yield from ("\n", " ", " \n\n ")
    elif not turn.calls:
        yield ""


def _arguments_of_turn(num_calls: int) -> Iterator[list[dict[str, Any]]]:
    """Arguments of all calls: none, two each, and none for the first or last call only."""
    one: list[dict[str, Any]] = [{TURN_KEY: f"{TURN_ARGUMENT}{k}z"} for k in range(num_calls)]
    if num_calls:
        yield [{}] * num_calls
        yield [{**arguments, f"{TURN_KEY}2": 1} for arguments in one]
    if num_calls > 1:
        yield [{}, *one[1:]]
        yield [*one[:-1], {}]
