"""Checks a window with the template's own constants as texts, which is part of a certificate.

A template may compare text with its string constants. So each of them is put into every role of a history, into the
turn, the new messages and the names of calls, and then all of them together, in both orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from unbroken.messages import Message
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.certificates.probe_window import ProbeWindow
from unbroken.rendering.bridge.histories.history_class import HistoryClass
from unbroken.rendering.bridge.histories.panel import HistoryPanel, build_history
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import BridgeShape, ShapeExample
from unbroken.rendering.bridge.window import TURN_TEXT, TextKind

MAX_CONSTANTS = 200
"""A template with more constants is refused."""
_MAX_PAIRS = 30
_ROLES = ("system", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


class ConstantsCheck:
    """Compares one window with conversations of the panel that contain the template's string constants, `literals`."""

    def __init__(
        self,
        window: ProbeWindow,
        panel: HistoryPanel,
        history_class: HistoryClass,
        *,
        of_history: Sequence[str],
        of_turn: Sequence[str],
    ) -> None:
        self._window = window
        self._panel = panel
        self._class = history_class
        self._of_history = [text for text in of_history if not history_class.excludes_any([text])]
        self._excluded = [text for text in of_history if history_class.excludes_any([text])]
        self._of_turn = [text for text in of_turn if not history_class.excludes_any([text])]
        self._start = build_history(panel.short_histories[0])
        self._all_roles = build_history(panel.all_roles)
        self._num_ends = window.count_turn_ends(self._start) if of_turn else None

    def check(self, shape: BridgeShape) -> None:
        """Try all constants. Raises `BridgeRefusedError` if one of them changes the text after the turn."""
        for literal in self._of_history:
            try:
                for text in _embed(literal):
                    self._check_text(text)
            except BridgeRefusedError as error:
                raise _blame(error, [literal]) from None
        for literal in self._excluded:  # from the history and the turn, but not from new messages
            for text in _embed(literal):
                self._check_example(self._window.example.with_text(text), f"a new message with {literal!r}")
        for literal in self._of_turn:
            for text in _embed(literal):
                self._check_turn(text)
            self._check_example(self._window.example.with_text(_embed(literal)[1]), f"a new message with {literal!r}")
            if shape.num_calls and _NAME.fullmatch(literal):
                self._check_example(ShapeExample.build(shape, names=(literal, f"{literal}2")), f"a call of {literal!r}")
        for texts in _combine(self._of_history):
            try:
                self._check_everywhere("\n".join(texts))
            except BridgeRefusedError as error:
                raise _blame(error, texts) from None

    def _check_text(self, text: str) -> None:
        description = f"the text {text!r}"
        for role in _ROLES:
            history = build_history(self._panel.all_roles, texts={role: text})
            if any(message["role"] == role for message in history):
                self._window.check_conversation(history, self._window.turn, description=description)
        self._check_example(self._window.example.with_text(text), description)

    def _check_turn(self, text: str) -> None:
        turn = self._window.example.turn
        if turn.text is TextKind.WORDS:
            texts = (text, f"{text}{TURN_TEXT}", f"{TURN_TEXT}{text}")
            self._window.check_turns(self._start, [turn.build_message(text=words) for words in texts], self._num_ends)

    def _check_everywhere(self, text: str) -> None:
        """Like `_check_text`, with fewer renderings: in the question, then in all places at once."""
        description = f"the text {text!r}"
        self._window.check_conversation(self._build_question(text), self._window.turn, description=description)
        turn = self._window.example.turn
        if turn.text is TextKind.WORDS:
            self._window.check_turns(self._start, [turn.build_message(text=text)], self._num_ends)
        try:
            window = self._window.change(self._window.example.with_text(text))
        except BridgeRefusedError:
            return
        history = build_history(self._panel.all_roles, texts=dict.fromkeys(_ROLES, text))
        window.check_conversation(history, window.turn, description=description)

    def _build_question(self, text: str) -> list[Message]:
        return build_history(self._panel.short_histories[0], texts={"user": text})

    def _check_example(self, example: ShapeExample, description: str) -> None:
        try:
            window = self._window.change(example)
        except BridgeRefusedError:
            return  # real messages like these will be refused too
        for history in (self._start, self._all_roles):
            window.check_conversation(history, window.turn, description=description)


def _embed(literal: str) -> tuple[str, str]:
    return literal, f"{literal} Hq7\n{literal}\nHq7 {literal}"


def _combine(literals: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Pairs of constants, around other words, if there are few; and all of them, in both orders."""
    if len(literals) * (len(literals) - 1) <= _MAX_PAIRS:
        yield from ((first, "Hq7", last) for first in literals for last in literals if first != last)
    if len(literals) > 1:
        yield tuple(literals)
        yield tuple(reversed(literals))


def _blame(error: BridgeRefusedError, texts: Sequence[str]) -> BridgeRefusedError:
    """The same error, because of these texts, if the history made a difference."""
    if error.refusal.reason is not RefusalReason.HISTORY_DEPENDENT:
        return error
    because_of = frozenset(text.lower() for text in texts)
    return BridgeRefusedError(error.refusal.reason, error.refusal.detail, because_of=because_of)
