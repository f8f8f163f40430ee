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
from typing import Any

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Refusal, RefusalReason
from unbroken.rendering.bridge.bridge_text import BridgeText
from unbroken.rendering.bridge.certificates.certificate import Certificate, CertificateRecord
from unbroken.rendering.bridge.certificates.constants import MAX_CONSTANTS, ConstantsCheck
from unbroken.rendering.bridge.certificates.history_effect import HistoryEffectProbe
from unbroken.rendering.bridge.certificates.probe_window import ProbeWindow
from unbroken.rendering.bridge.certificates.random_check import RandomCheck
from unbroken.rendering.bridge.certificates.rendering_memory import RenderingMemory
from unbroken.rendering.bridge.certificates.tool_panel import (
    SMALL_TOOLS,
    build_tool_sets,
    depends_on_tools,
    is_same_with_tools,
)
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY, HistoryClass, iterate_texts
from unbroken.rendering.bridge.histories.panel import MAX_COUNT, HistoryPanel, build_history
from unbroken.rendering.bridge.histories.random_panel import RandomPanel
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import CALL_ID_PREFIX, NEW_TEXT, BridgeShape, ShapeExample
from unbroken.rendering.bridge.window import TURN_ARGUMENT, TURN_KEY, TextKind, WindowRenderer, WindowTurn
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.jinja.reads import Read, ReadKind
from unbroken.rendering.jinja.tool_expressions import ToolEffect
from unbroken.rendering.message_format import PROBE_ARGUMENT, PROBE_NAMES, PROBE_USER

_NUM_REASONED = 20
"""How many of the listed histories are tried with a turn that reasons, too."""
_NUM_WITH_TOOLS = 24
_MAX_PIECE = 2
"""A text of so few characters may stand in all sentinels, and is then never absent."""
_STEP_NEAR_CONSTANTS = 6
"""Each so many of the histories near constants is tried together with other conditions."""
_NUM_WITH_NEW_TOOLS = 4


class Certifier:
    """Examines shapes for one template; `reasoning` are the texts that open and close its reasoning."""

    def __init__(self, template: ChatTemplate, windows: WindowRenderer, reasoning: tuple[str, str]) -> None:
        self._memories = [RenderingMemory(template)]
        self._windows = windows.with_template(self._memories[0])
        self._renders_reasoning = windows.message_format.reasoning_key is not None
        self._integers = template.integers()
        self._literals = template.literals()
        self._reads = template.reads()
        self._texts = _get_texts(self._reads.of_history)
        self._texts_of_turn = _get_texts(self._reads.of_turn | self._reads.of_history)
        self._counts = _get_numbers(self._reads.of_history, ReadKind.COUNT)
        self._lengths = _get_numbers(self._reads.of_history | self._reads.of_turn, ReadKind.LENGTH)
        self._tool_effect = template.tool_effect()
        self._template = template
        self._random_checks: dict[bool, RandomCheck] = {}
        self._effects = HistoryEffectProbe(windows.message_format, reasoning)

    def examine(
        self,
        shape: BridgeShape,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass = ANY_HISTORY,
        *,
        for_any_tools: bool = False,
    ) -> CertificateRecord:
        """Compare the window of a shape with the panel of a class of histories.

        With `for_any_tools`, `tools` are an example: if no tools of their panel change the bridge, `needs_tools` is
        False, and the certificate holds for all tools for which `holds_for_tools` is true.
        """
        num_before, start = self._count_renderings(), time.perf_counter()
        outcome: Certificate | Refusal
        because_of = frozenset[str]()
        try:
            outcome = self._certify(shape, tools, history_class, for_any_tools=for_any_tools)
        except BridgeRefusedError as error:
            outcome = error.refusal
            because_of = frozenset(text for text in error.because_of if not _is_in_every_panel(text))
        return CertificateRecord(
            shape=shape,
            history_class=history_class,
            num_tools=None if for_any_tools else len(tools),
            outcome=outcome,
            because_of=because_of,
            num_renderings=self._count_renderings() - num_before,
            duration_s=time.perf_counter() - start,
        )

    def _count_renderings(self) -> int:
        return sum(memory.num_renderings for memory in self._memories)

    def forget_renderings(self) -> None:
        """Free the memory of what was rendered. Before that, examinations for several classes share it."""
        for memory in self._memories:
            memory.forget()

    def holds_for_tools(self, shape: BridgeShape, tools: Sequence[ToolSchema], history_class: HistoryClass) -> bool:
        """Whether these tools change nothing in a bridge that was certified without need of tools."""
        panel = self._build_panel(history_class)
        try:
            window = ProbeWindow(self._windows, ShapeExample.build(shape), tools=(), history_class=history_class)
        except BridgeRefusedError:
            return False
        if self._tool_effect < ToolEffect.ANYTHING and (tools or self._tool_effect is ToolEffect.NOTHING):
            return is_same_with_tools(window, (), tools)
        drawn = self._build_random_panel(history_class).draw_histories(_NUM_WITH_NEW_TOOLS)
        return is_same_with_tools(window, (*panel.short_histories, panel.long_history), tools, drawn)

    def _certify(
        self, shape: BridgeShape, tools: Sequence[ToolSchema], history_class: HistoryClass, *, for_any_tools: bool
    ) -> Certificate:
        self._check_reach()
        panel = self._build_panel(history_class)
        window = ProbeWindow(self._windows, ShapeExample.build(shape), tools=tools, history_class=history_class)
        window.check_new_messages()
        window = window if self._tool_effect is ToolEffect.ANYTHING else self._try_fewer_tools(window)
        self._check_histories(window, panel)
        small = self._try_fewer_tools(window)
        self._check_turns(small, panel)
        ConstantsCheck(small, panel, history_class, of_history=self._texts, of_turn=self._texts_of_turn).check(shape)
        needs_tools = self._find_need_of_tools(window, panel, for_any_tools=for_any_tools)
        effect, effect_with_reasoning = self._effects.find_effects(small, panel)
        return Certificate(
            history_class=history_class,
            bridge_text=BridgeText.split(window.bridge_text, window.example),
            shows_text=window.shows_text,
            needs_tools=needs_tools,
            number_offsets=window.number_offsets,
            depends_on_turn=any(read.kind is ReadKind.OPAQUE for read in self._reads.of_turn),
            needs_unique_ids=self._looks_up_ids(window),
            history=effect,
            history_with_reasoning=effect_with_reasoning,
        )

    def _build_panel(self, history_class: HistoryClass) -> HistoryPanel:
        return HistoryPanel(
            renders_calls=self._windows.message_format.renders_calls,
            counts=self._counts,
            lengths=self._lengths,
            history_class=history_class,
            with_images=self._windows.placeholder is not None,
        )

    def _find_need_of_tools(self, window: ProbeWindow, panel: HistoryPanel, *, for_any_tools: bool) -> bool:
        """Compare with random conversations, and return whether tools change the bridge, with any of these or alone."""
        if self._tool_effect is ToolEffect.NOTHING or not window.tools:
            self._check_at_random(window, panel)
            return bool(window.tools)  # The template refuses messages without tools.
        is_any = for_any_tools and self._tool_effect is ToolEffect.ANYTHING
        sets = tuple(build_tool_sets(self._literals, self._integers)) if is_any else ()
        try:
            self._check_at_random(window, panel, ((), *sets))
        except BridgeRefusedError:
            self._check_at_random(window, panel)
            return True
        if not for_any_tools:
            return not is_same_with_tools(window, (), ())
        drawn = list(self._build_random_panel(window.history_class).draw_histories(_NUM_WITH_TOOLS))
        return depends_on_tools(window, panel, sets, drawn)

    def _try_fewer_tools(self, window: ProbeWindow) -> ProbeWindow:
        """The window with one small tool, or none, if that does not change the text after the turn: it is cheaper."""
        may_have_none = self._tool_effect is ToolEffect.NOTHING
        for tools in ((), SMALL_TOOLS) if may_have_none else (SMALL_TOOLS,):
            if window.tools and is_same_with_tools(window, (), tools):
                return window.change(tools=tools)
        return window

    def _build_random_panel(self, history_class: HistoryClass) -> RandomPanel:
        return RandomPanel(
            reads=self._reads,
            texts=self.find_watched_texts(),
            lengths=self._lengths,
            renders_calls=self._windows.message_format.renders_calls,
            history_class=history_class,
        )

    def find_watched_texts(self) -> tuple[str, ...]:
        """The texts that a bridge may depend on."""
        return tuple(dict.fromkeys((*self._texts_of_turn, *self._literals)))

    def _check_reach(self) -> None:
        """Refuse a template that reads what no panel can vary."""
        opaque = self._reads.get_values(ReadKind.OPAQUE)
        reasons = [f"what it writes after a turn may depend on {what}" for what in opaque]
        masked = [text for text in self._texts if len(text) <= _MAX_PIECE and _is_in_every_panel(text)]
        reasons += [f"the text {text!r}, which each synthetic text contains" for text in masked]
        reasons += [f"it counts to {count}" for count in self._counts if count > MAX_COUNT]
        if reasons:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the template cannot be examined: {'; '.join(reasons[:3])}"
            )
        if (num := len(self._texts_of_turn) + len(self._counts) + len(self._lengths)) > MAX_CONSTANTS:
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED,
                f"the template compares with {num} texts and numbers, at most {MAX_CONSTANTS} are supported",
            )

    def _check_at_random(
        self,
        window: ProbeWindow,
        panel: HistoryPanel,
        other_tools: Sequence[Sequence[ToolSchema]] = (),
    ) -> None:
        """Compare with random conversations, which combine what the template may depend on."""
        near_constants = list(panel.histories_near_constants())[::_STEP_NEAR_CONSTANTS]
        for reaches_all in (True, False):
            is_done = self._get_random_check(reaches_all=reaches_all).check(
                window.example,
                window.tools,
                window.history_class,
                self._build_random_panel(window.history_class),
                [_build_history(spelling, panel) for spelling in near_constants],
                other_tools=other_tools,
            )
            if is_done:
                break

    def _get_random_check(self, *, reaches_all: bool) -> RandomCheck:
        if reaches_all not in self._random_checks:
            template, conditions = self._template.mark_conditions(reaches_all=reaches_all)
            memory = RenderingMemory(template, conditions)
            self._memories.append(memory)
            self._random_checks[reaches_all] = RandomCheck(
                self._windows.with_template(memory), conditions, with_reasoning=self._renders_reasoning
            )
        return self._random_checks[reaches_all]

    def _check_histories(self, window: ProbeWindow, panel: HistoryPanel) -> None:
        turns = [window.turn]
        if self._renders_reasoning:
            turns.append(window.example.turn.build_message(with_reasoning=True))
        num_rendered = 0
        for number, spelling in enumerate(panel.histories()):
            history = _build_history(spelling, panel)
            for turn in turns if number < _NUM_REASONED else turns[:1]:
                num_rendered += window.check_conversation(history, turn, description=f"the history {spelling!r}")
        if num_rendered == 0:
            raise BridgeRefusedError(
                RefusalReason.TEMPLATE_RAISES, "the template refuses this turn after every history"
            )
        for spelling, role, text in panel.histories_of_texts():
            history = build_history(spelling, texts={role: text})
            window.check_conversation(history, window.turn, description=f"a {role} message of {len(text)} characters")
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


def _is_in_every_panel(text: str) -> bool:
    """Whether the sentinels contain the text, so that no panel is without it."""
    spelling = "suqtdttxtau"
    turn = WindowTurn(calls=((PROBE_NAMES[0], f"{CALL_ID_PREFIX}00000"),), text=TextKind.WORDS)
    messages = [
        *build_history(spelling),
        *build_history(spelling, text=PROBE_USER, argument=PROBE_ARGUMENT, call_id_prefix="prefix"),
        turn.build_message(with_reasoning=True),
    ]
    texts = (NEW_TEXT, *(text for message in messages for text in iterate_texts(message)))
    return any(text.lower() in own.lower() for own in texts)


def _get_texts(reads: frozenset[Read]) -> tuple[str, ...]:
    return tuple(sorted({r.value for r in reads if r.kind is ReadKind.TEXT and str(r.value or "").strip()}))


def _get_numbers(reads: frozenset[Read], kind: ReadKind) -> tuple[int, ...]:
    return tuple(sorted({abs(read.value) for read in reads if read.kind is kind and abs(read.value or 0) > 2}))


def _build_history(spelling: str, panel: HistoryPanel) -> list[Message]:
    return build_history(spelling, long_text=panel.long_text)


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
