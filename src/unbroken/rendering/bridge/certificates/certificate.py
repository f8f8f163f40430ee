"""The certificate of a shape: the result of its examination, and the record of it."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.messages import Message, get_reasoning
from unbroken.rendering.base import HistoryEffect, Refusal
from unbroken.rendering.bridge.bridge_text import BridgeText
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY, HistoryClass
from unbroken.rendering.bridge.shapes import BridgeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result for one shape and one class of histories."""

    history_class: HistoryClass
    bridge_text: BridgeText | None
    """The text of the bridge, with places for the texts of the new messages."""
    shows_text: bool
    """Whether the template renders text beside calls."""
    needs_tools: bool
    """Whether the tool schemas reach the bridge; without them the window is much cheaper to render."""
    number_offsets: tuple[int, ...]
    """What the numbers in the bridge add to what `history_class.counted` is after the history."""
    depends_on_turn: bool
    """Whether something of the turn may matter that no panel can be made for: then the turn itself is rendered."""
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
    because_of: frozenset[str]
    """The texts that made it a refusal, in lower case: histories without them may get a certificate."""
    num_renderings: int
    duration_s: float

    def __str__(self) -> str:
        is_for_any = self.history_class == ANY_HISTORY
        return str(self.shape) if is_for_any else f"{self.shape} ({self.history_class})"
