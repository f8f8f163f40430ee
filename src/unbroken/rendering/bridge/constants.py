"""What a template compares text with, put into every place where text may stand: part of a certificate.

Each string constant of the template's syntax tree is put into every role of a history, into the turn, the new messages
and the calls' names; all of them together, in both orders, into the same places. At most `MAX_CONSTANTS` are tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from unbroken.rendering.bridge.panel import HistoryPanel, build_history
from unbroken.rendering.bridge.probe_window import ProbeWindow, TemplateMessages
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import BridgeShape, ShapeExample
from unbroken.rendering.bridge.window import TURN_TEXT, TextKind
from unbroken.rendering.message_format import MessageFormat

MAX_CONSTANTS = 200
_MAX_PAIRS = 30
_ROLES = ("system", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


class ConstantsCheck:
    """Holds one window against conversations that hold the template's constants.

    Args:
        window: what to compare with.
        panel: where histories come from.
        forms: the template's forms.
        literals: its string constants.
    """

    def __init__(
        self, window: ProbeWindow, panel: HistoryPanel, message_format: MessageFormat, literals: Sequence[str]
    ) -> None:
        self._window = window
        self._panel = panel
        self._message_format = message_format
        self._literals = literals
        self._start = message_format.convert(build_history(panel.short[0]))
        self._cycle = message_format.convert(build_history(panel.cycle))
        self._num_ends = window.count_turn_ends(self._start) if literals else None

    def check(self, shape: BridgeShape) -> None:
        """Try all constants.

        Raises:
            BridgeRefusedError: the bridge_text is another one with one of them.
        """
        for literal in self._literals:
            for text in (literal, f"{literal} Hq7\n{literal}\nHq7 {literal}"):
                self._check_text(text)
            if shape.num_calls and _NAME.fullmatch(literal):
                self._check_case(ShapeExample.build(shape, names=(literal, f"{literal}2")), f"a call of {literal!r}")
        for text in _pairs(self._literals):
            self._check_everywhere(text)

    def _check_text(self, text: str) -> None:
        description = f"the text {text!r}"
        self._window.check_conversation(self._question(text), self._window.turn, description=description)
        for role in _ROLES:
            history = build_history(self._panel.cycle, texts={role: text})
            if any(message["role"] == role for message in history):
                self._window.check_conversation(
                    self._message_format.convert(history), self._window.turn, description=description
                )
        turn = self._window.example.turn
        if turn.text is TextKind.WORDS:
            texts = (text, f"{text}{TURN_TEXT}", f"{TURN_TEXT}{text}")
            self._window.check_turns(self._start, [turn.build_message(text=words) for words in texts], self._num_ends)
        self._check_case(self._window.example.with_text(text), description)

    def _check_everywhere(self, text: str) -> None:
        """Like `_check_text`, with few renderings: in the question, and in all places at once."""
        description = f"the text {text!r}"
        self._window.check_conversation(self._question(text), self._window.turn, description=description)
        turn = self._window.example.turn
        if turn.text is TextKind.WORDS:
            self._window.check_turns(self._start, [turn.build_message(text=text)], self._num_ends)
        try:
            window = self._window.of(self._window.example.with_text(text))
        except BridgeRefusedError:
            return
        history = build_history(self._panel.cycle, texts=dict.fromkeys(_ROLES, text))
        window.check_conversation(self._message_format.convert(history), window.turn, description=description)

    def _question(self, text: str) -> TemplateMessages:
        return self._message_format.convert(build_history(self._panel.short[0], texts={"user": text}))

    def _check_case(self, example: ShapeExample, description: str) -> None:
        """Compare another case's window with what the template writes after other histories."""
        try:
            window = self._window.of(example)
        except BridgeRefusedError:
            return  # the same refusal meets these messages when they come
        for history in (self._start, self._cycle):
            window.check_conversation(history, window.turn, description=description)


def _pairs(literals: Sequence[str]) -> Iterator[str]:
    """Texts with two constants, one at each end, if there are few; and with all of them, in both orders."""
    if len(literals) * (len(literals) - 1) <= _MAX_PAIRS:
        yield from (f"{first}\nHq7\n{last}" for first in literals for last in literals if first != last)
    if len(literals) > 1:
        yield "\n".join(literals)
        yield "\n".join(reversed(literals))
