"""Renders the window of one bridge: the turn that ended, with its real names and ids, and the real new messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from unbroken.errors import MessagesError
from unbroken.messages import KNOWN_ROLES, Message, ToolSchema, get_text, iterate_strings
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.certificates.certificate import Certificate
from unbroken.rendering.bridge.histories.history_class import HistoryClass, count_messages
from unbroken.rendering.bridge.numbers import find_numbers
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.window import TurnEndMatch, WindowRenderer, WindowTurn
from unbroken.rendering.encoding.marks import (
    Span,
    find_outside_strings,
    mark_messages,
    mark_suspicious_strings,
    read_marks,
)
from unbroken.rendering.encoding.safe_encoder import SafeEncoder

_PLAIN_KEYS = frozenset({"role", "content", "name", "tool_call_id"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWindow:
    """A rendered window, the spans of text from outside in it, and the end of the turn."""

    text: str
    spans: Sequence[Span]
    turn_end: TurnEndMatch
    turn: Message
    sentinels: tuple[str, ...]
    new_messages: Sequence[Mapping[str, Any]]
    """In the template's format."""
    tools: Sequence[ToolSchema]


class TurnWindowRenderer:
    """Renders windows for bridges, and adapts them to a history and a turn where a certificate asks for that."""

    def __init__(self, windows: WindowRenderer, encoder: SafeEncoder) -> None:
        self._windows = windows
        self._encoder = encoder

    def render(
        self, turn: WindowTurn, new_messages: Sequence[Message], certificate: Certificate, tools: Sequence[ToolSchema]
    ) -> TurnWindow:
        """Render the window. Raises `BridgeRefusedError` if text from outside cannot be
        distinguished from the template's own.
        """
        tools = tools if certificate.needs_tools else ()
        try:
            converted = self._windows.message_format.convert(new_messages)
        except MessagesError as error:
            raise BridgeRefusedError(RefusalReason.UNSUPPORTED, f"new {error}") from None
        message = turn.build_message()
        sentinels = turn.get_sentinels(shows_text=certificate.shows_text)
        history_class = certificate.history_class
        text = self._windows.render_window(message, converted, tools=tools, history_class=history_class)
        turn_end = self._windows.find_turn_end(text, sentinels)
        spans = self._find_known_spans(text, turn_end, turn, new_messages, certificate)
        if spans is None:
            spans = self._find_marked_spans(text, message, converted, tools, history_class)
        if any(span.start < turn_end.stop and turn_end.start < span.stop for span in spans):
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, "a call's name or id spells the end of the turn")
        return TurnWindow(
            text=text,
            spans=spans,
            turn_end=turn_end,
            turn=message,
            sentinels=sentinels,
            new_messages=converted,
            tools=tools,
        )

    def check_turn(self, assistant: Message, window: TurnWindow, certificate: Certificate) -> None:
        """Compare the window with one of the turn as it is, after a longer history.

        For templates that read a part of a turn or of a new message that no panel can vary. Raises
        `BridgeRefusedError` if the text after the turn differs.
        """
        if certificate.history_class.counted is not None:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, "the text after the turn may depend on a count and on this turn"
            )
        [turn] = self._windows.message_format.convert([assistant])
        text = self._render_longer(cast(Message, turn), window, certificate.history_class)
        num_own = sum(map(self._windows.count_turn_ends, iterate_strings(assistant)))
        long_text = self._render_longer(window.turn, window, certificate.history_class)
        num_more = self._windows.count_turn_ends(text) - self._windows.count_turn_ends(long_text)
        if not text.endswith(window.text[window.turn_end.start :]) or not 0 <= num_more <= num_own:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, "the text after the turn depends on what this turn says"
            )

    def count_on(self, window: TurnWindow, certificate: Certificate, counts: Mapping[Any, int]) -> TurnWindow:
        """Return the window as it is after a history with these `counts`, for a class whose template writes a count."""
        history_class = certificate.history_class
        assert history_class.counted is not None
        prefixes = [self._windows.get_prefix(history_class, is_longer=is_longer) for is_longer in (False, True)]
        old, other = (count_messages(prefix, history_class.counted) for prefix in prefixes)
        longer = self._render_longer(window.turn, window, history_class)
        end = window.turn_end
        longer_end = self._windows.find_turn_end(longer, window.sentinels)
        numbers = find_numbers(window.text[end.start :], old, longer[longer_end.start :], other)
        if numbers is None or numbers.offsets != certificate.number_offsets:
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED,
                "the numbers in the text after the turn cannot be distinguished from its other digits",
            )
        count = counts[history_class.counted]
        spans = [
            replace(
                span,
                start=end.start + numbers.move(span.start - end.start, old, count),
                stop=end.start + numbers.move(span.stop - end.start, old, count),
            )
            if span.start >= end.stop
            else span
            for span in window.spans
        ]
        return replace(window, text=window.text[: end.start] + numbers.write(count), spans=spans)

    def _render_longer(self, turn: Message, window: TurnWindow, history_class: HistoryClass) -> str:
        return self._windows.render_window(
            turn, window.new_messages, tools=window.tools, history_class=history_class, has_long_prefix=True
        )

    def _find_known_spans(
        self,
        text: str,
        turn_end: TurnEndMatch,
        turn: WindowTurn,
        new_messages: Sequence[Message],
        certificate: Certificate,
    ) -> list[Span] | None:
        """Find the text from outside with the certificate's text; None if that does not show all of it."""
        if certificate.bridge_text is None or certificate.needs_tools:
            return None
        if not all(_PLAIN_KEYS.issuperset(message) and message["role"] in KNOWN_ROLES for message in new_messages):
            return None
        names = [string for call in turn.calls for string in call]
        names += [str(message.get(key) or "") for message in new_messages for key in ("name", "tool_call_id")]
        if any(map(self._encoder.may_forge, names)):
            return None
        texts = [get_text(message.get("content")) for message in new_messages]
        return certificate.bridge_text.find_spans(text, turn_end.start, turn, texts)

    def _find_marked_spans(
        self,
        text: str,
        turn: Message,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema],
        history_class: HistoryClass,
    ) -> list[Span]:
        """Find the text from outside by rendering the window again, with marks."""
        may_forge = self._encoder.may_forge
        marked_turn: Message = {**turn}
        if "tool_calls" in turn:
            marked_turn["tool_calls"] = mark_suspicious_strings(turn["tool_calls"], may_forge)
        try:
            marked = self._windows.render_window(
                marked_turn,
                mark_messages(new_messages, may_forge),
                tools=mark_suspicious_strings(tools, may_forge),
                history_class=history_class,
            )
            spans = read_marks(marked, text)
        except BridgeRefusedError:
            spans = None
        if spans is not None:
            return spans
        named = {"tool_calls": turn.get("tool_calls")}
        if any(map(may_forge, find_outside_strings([named, *new_messages], tools))):
            raise BridgeRefusedError(
                RefusalReason.UNSAFE_TEXT, "the template rewrites text that has a control token in it"
            )
        return []
