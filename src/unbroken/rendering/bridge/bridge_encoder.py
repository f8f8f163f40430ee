"""Encodes windows: finds where a bridge starts, given the last sampled id, and encodes the text from there on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unbroken.errors import ImageError
from unbroken.images.inputs import ImageInputs
from unbroken.rendering.base import Bridge, Closing, HistoryEffect, RefusalReason
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.bridge.turn_window import TurnWindow
from unbroken.rendering.encoding.marks import Span
from unbroken.rendering.encoding.safe_encoder import SafeEncoder, UnsafeTextError
from unbroken.rendering.images import MessageImage, PlaceholderError, place_images
from unbroken.rendering.reasoning import ReasoningDelimiters
from unbroken.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeStart:
    """Where in a window a bridge starts, and how it closes the turn."""

    position: int
    anchor: str = ""
    """A control token to encode the bridge after; its id is not part of the bridge."""
    text_before: str = ""
    closing: Closing = Closing.NONE
    num_taken_back: int = 0


class BridgeEncoder:
    """Encodes the bridges of one template and one tokenizer."""

    def __init__(
        self,
        encoder: SafeEncoder,
        ends: TurnEnds,
        *,
        reasoning: ReasoningDelimiters | None,
        stop_token_ids: frozenset[int],
    ) -> None:
        self._encoder = encoder
        self._ends = ends
        self._unambiguous_ends = ends.tokens - ends.ambiguous
        self._reasoning = reasoning
        self._stop_token_ids = stop_token_ids

    def find_start(self, window: TurnWindow, last_id: int, ends_in_reasoning: Callable[[], bool]) -> BridgeStart:
        """Find the start of the bridge after a turn whose last sampled id is `last_id`; see `BridgeBuilder.build`."""
        turn_end = window.turn_end
        last = self._encoder.control.get_text(last_id)
        if last is not None and last in self._unambiguous_ends:
            if (position := self._find_sampled_end(window, last)) is not None:
                return BridgeStart(position=position, anchor=last)
            if last in self._ends.headers:
                return BridgeStart(position=turn_end.start, num_taken_back=1)
            return BridgeStart(position=turn_end.start, closing=Closing.FOREIGN_STOP)
        if last_id in self._stop_token_ids:
            return BridgeStart(position=turn_end.start, closing=Closing.FOREIGN_STOP)
        if self._reasoning is not None and ends_in_reasoning():
            text, anchor = self._reasoning.close_text, turn_end.token
            return BridgeStart(position=turn_end.start, closing=Closing.REASONING, text_before=text, anchor=anchor)
        return BridgeStart(position=turn_end.start, closing=Closing.TRUNCATED)

    def _find_sampled_end(self, window: TurnWindow, last: str) -> int | None:
        """The end of the sampled id `last` in the window's end of the turn; None if the template writes another end."""
        turn_end = window.turn_end
        if last == turn_end.token or self._ends.last_turn_ends.get(last) == turn_end.token:
            return turn_end.stop
        for ending in self._ends.endings:
            if last in ending and window.text.startswith(ending, turn_end.start):
                return turn_end.start + ending.index(last) + len(last)
        return None

    def _count_closing(self, window: TurnWindow, start: BridgeStart, bridge_ids: TokenIds) -> int:
        """The ids up to the last control token of the turn's end."""
        text, turn_end = window.text, window.turn_end
        if start.closing is Closing.NONE or turn_end.token in self._ends.headers:
            return 0
        endings = [ending for ending in self._ends.endings if text.startswith(ending, turn_end.start)]
        end = max(endings, key=len, default=text[turn_end.start : turn_end.stop])
        control = self._encoder.control
        num_control = sum(1 for _ in control.find(start.text_before + end))
        found = np.flatnonzero(np.isin(bridge_ids, list(control.ids)))
        return int(found[num_control - 1]) + 1 if 0 < num_control <= len(found) else 0

    def encode(
        self,
        window: TurnWindow,
        start: BridgeStart,
        history: HistoryEffect,
        images: Sequence[MessageImage],
        inputs: ImageInputs | None,
    ) -> Bridge:
        """Encode the window from `start` on, after a control token: to the tokenizer it is not the start of a text.

        Raises `BridgeRefusedError` if that is impossible without forging a control id, or an image is refused.
        """
        before = start.anchor + start.text_before
        shift = len(before) - start.position
        spans = [
            Span(start=span.start + shift, stop=span.stop + shift, index=span.index)
            for span in window.spans
            if span.start >= start.position
        ]
        try:
            encoding = self._encoder.encode(before + window.text[start.position :], spans)
        except UnsafeTextError as error:
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, str(error)) from None
        skip = 1 if start.anchor else 0
        if start.anchor and self._encoder.control.get_text(int(encoding.token_ids[0])) != start.anchor:
            raise BridgeRefusedError(RefusalReason.UNDERIVABLE, f"{start.anchor!r} is not encoded as one id")
        try:
            placed = place_images(encoding.token_ids[skip:], encoding.message_indices[skip:], images, inputs)
        except PlaceholderError as error:
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, str(error)) from None
        except ImageError as error:
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
        return Bridge(
            bridge_ids=placed.token_ids,
            message_indices=placed.message_indices,
            images=placed.images,
            closing=start.closing,
            num_closing=self._count_closing(window, start, placed.token_ids),
            num_taken_back=start.num_taken_back,
            history=history,
        )
