r"""P2: what a fresh rendering would do to all that a bridge follows. That the bridge is exact (P1) does not tell.

Worked through for two templates (R is reasoning, A the turn's text):

    prompt and turn                      the same, once a user message follows           effect
    ..assistant\nA                       ..assistant\nA<|im_end|>\n<|im_start|>user..    KEPT
    ..assistant\n<think>\nR\n</think>A   ..assistant\nA<|im_end|>\n<|im_start|>user..    DROPS_REASONING

A generation prompt that the history does not repeat (DeepSeek's `<think>\n`) is a change too.
"""

from __future__ import annotations

import re

from unbroken.messages import Message
from unbroken.rendering.base import HistoryEffect
from unbroken.rendering.bridge.panel import HistoryPanel, build_history
from unbroken.rendering.bridge.probe_window import ProbeWindow
from unbroken.rendering.message_format import MessageFormat

_ORDER = (HistoryEffect.KEPT, HistoryEffect.DROPS_REASONING, HistoryEffect.REWRITTEN)


class HistoryEffectProbe:
    """Compares what a template writes before and after new messages follow.

    Args:
        forms: the template's forms.
        reasoning: what opens and closes reasoning.
    """

    def __init__(self, message_format: MessageFormat, reasoning: tuple[str, str]) -> None:
        self._message_format = message_format
        opening, closing = map(re.escape, reasoning)
        self._empty_reasoning = re.compile(rf"{opening}\s*(?:{closing}\s*)?")

    def find(self, window: ProbeWindow, panel: HistoryPanel, *, turn_reasons: bool) -> HistoryEffect:
        """The strongest effect over a few histories of the panel, after a turn with or without reasoning."""
        turn = window.example.turn.build_message(
            with_reasoning=turn_reasons and self._message_format.reasoning_key is not None
        )
        effects = [self._effect(window, build_history(spelling), turn) for spelling in panel.histories_for_effect()]
        return max(effects, key=_ORDER.index, default=HistoryEffect.KEPT)

    def _effect(self, window: ProbeWindow, history: list[Message], turn: Message) -> HistoryEffect:
        texts = window.render_with_and_without(self._message_format.convert(history), turn)
        if texts is None or _is_kept(*texts):
            return HistoryEffect.KEPT
        silent = [_without_reasoning(message) for message in (*history, turn)]
        texts = window.render_with_and_without(self._message_format.convert(silent[:-1]), silent[-1])
        if texts is None:
            return HistoryEffect.REWRITTEN
        bare = tuple(self._empty_reasoning.sub("", text) for text in texts)
        return HistoryEffect.DROPS_REASONING if _is_kept(*bare) else HistoryEffect.REWRITTEN


def _is_kept(prompt: str, last: str, full: str) -> bool:
    """Whether the conversation still begins with the prompt, and with the turn, as it did without what follows."""
    return full.startswith(prompt) and full == last


def _without_reasoning(message: Message) -> Message:
    silent: Message = {**message}
    silent.pop("reasoning_content", None)
    return silent
