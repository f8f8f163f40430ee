r"""Finds the effect of a fresh rendering on everything before a bridge (P2), which an exact bridge (P1) leaves open.

Two templates (R is reasoning, A the turn's text):

    prompt and turn                      the same, once a user message follows           effect
    ..assistant\nA                       ..assistant\nA<|im_end|>\n<|im_start|>user..    KEPT
    ..assistant\n<think>\nR\n</think>A   ..assistant\nA<|im_end|>\n<|im_start|>user..    DROPS_REASONING

A generation prompt that the history does not contain (DeepSeek's `<think>\n`) is a change too.
"""

from __future__ import annotations

import re

from unbroken.messages import Message
from unbroken.rendering.base import HistoryEffect
from unbroken.rendering.bridge.certificates.probe_window import ProbeWindow
from unbroken.rendering.bridge.histories.panel import HistoryPanel, build_history
from unbroken.rendering.message_format import MessageFormat

_ORDER = (HistoryEffect.KEPT, HistoryEffect.DROPS_REASONING, HistoryEffect.REWRITTEN)


class HistoryEffectProbe:
    """Compares history and turn with and without new messages after them; `reasoning` opens and closes reasoning."""

    def __init__(self, message_format: MessageFormat, reasoning: tuple[str, str]) -> None:
        self._message_format = message_format
        opening, closing = map(re.escape, reasoning)
        self._empty_reasoning = re.compile(rf"{opening}\s*(?:{closing}\s*)?")

    def find_effects(self, window: ProbeWindow, panel: HistoryPanel) -> tuple[HistoryEffect, HistoryEffect]:
        """The strongest effects over a few histories of the panel, for a turn without and with reasoning."""
        without = self._find_effect(window, panel, window.example.turn.build_message())
        if self._message_format.reasoning_key is None:
            return without, without
        return without, self._find_effect(window, panel, window.example.turn.build_message(with_reasoning=True))

    def _find_effect(self, window: ProbeWindow, panel: HistoryPanel, turn: Message) -> HistoryEffect:
        effects = [self._find_one(window, build_history(spelling), turn) for spelling in panel.histories_for_effect()]
        return max(effects, key=_ORDER.index, default=HistoryEffect.KEPT)

    def _find_one(self, window: ProbeWindow, history: list[Message], turn: Message) -> HistoryEffect:
        texts = window.render_with_and_without(history, turn)
        if texts is None or _is_kept(*texts):
            return HistoryEffect.KEPT
        bare = [_remove_reasoning(message) for message in (*history, turn)]
        texts = window.render_with_and_without(bare[:-1], bare[-1])
        if texts is None:
            return HistoryEffect.REWRITTEN
        stripped = tuple(self._empty_reasoning.sub("", text) for text in texts)
        return HistoryEffect.DROPS_REASONING if _is_kept(*stripped) else HistoryEffect.REWRITTEN


def _is_kept(prompt: str, last: str, full: str) -> bool:
    """Whether the new messages change neither the prompt nor the turn."""
    return full.startswith(prompt) and full == last


def _remove_reasoning(message: Message) -> Message:
    bare: Message = {**message}
    bare.pop("reasoning_content", None)
    return bare
