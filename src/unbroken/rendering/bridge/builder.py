r"""Builds bridges (I1): the ids between a sampled turn and the next generation prompt, from a window and a certificate.

ChatML, ids shortened: the engine sampled `[.., call, <|im_end|>]` and one tool reply "42" follows. The window reads

    ..assistant\nWq7Text<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n
                                  `--------------------- the bridge ----------------------´

Had the turn been cut by length, the bridge would begin with the `<|im_end|>` before that (I7).

Only the last sampled id is read; a turn without a stop id is also parsed, to see whether it ended inside its reasoning.
Sampled ids are never searched for ends, because a model may sample or spell control tokens anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from unbroken.errors import ImageError, MessagesError
from unbroken.images.inputs import ImageInputs
from unbroken.messages import IMAGE_TYPES, Message, ToolSchema, check_messages, get_text, has_images, iterate_strings
from unbroken.rendering.base import (
    Bridge,
    BridgeOutcome,
    Closing,
    HistoryEffect,
    HistoryPolicy,
    RefusalReason,
)
from unbroken.rendering.bridge.certificate import Certificate, CertificateRecord, Certifier
from unbroken.rendering.bridge.certificates import CertificateStore
from unbroken.rendering.bridge.history_class import HistoryClass, count_messages
from unbroken.rendering.bridge.numbers import find_numbers
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import BridgeShape, ContentKind, NewMessageShape
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.bridge.window import TextKind, TurnEndMatch, WindowRenderer, WindowTurn
from unbroken.rendering.encoding.marks import (
    Span,
    find_outside_strings,
    mark_messages,
    mark_suspicious_strings,
    read_marks,
)
from unbroken.rendering.encoding.safe_encoder import SafeEncoder, UnsafeTextError
from unbroken.rendering.images import MessageImage, PlaceholderError, load_images, place_images
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.lock import RendererLock
from unbroken.rendering.message_format import MessageFormat
from unbroken.rendering.reasoning import ReasoningDelimiters, find_reasoning_markup


class BridgeBuilder:
    """Builds bridges for one template with its options and one tokenizer, and keeps their certificates."""

    def __init__(
        self,
        *,
        template: ChatTemplate,
        message_format: MessageFormat,
        ends: TurnEnds,
        encoder: SafeEncoder,
        reasoning: ReasoningDelimiters | None,
        stop_token_ids: frozenset[int],
        lock: RendererLock,
        policy: HistoryPolicy = HistoryPolicy.EXACT,
        placeholder: str | None = None,
    ) -> None:
        self._lock = lock
        self._message_format = message_format
        self._ends = ends
        self._encoder = encoder
        self._reasoning = reasoning
        self._stop_token_ids = stop_token_ids
        self._windows = WindowRenderer(template, message_format, ends, placeholder=placeholder)
        markup = find_reasoning_markup(template, message_format, encoder.control)
        self._certificates = CertificateStore(Certifier(template, self._windows, markup))
        self._policy = policy
        self._keys = template.reads().keys

    def build(
        self,
        last_id: int,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema],
        earlier: Sequence[Message] | None,
        ends_in_reasoning: Callable[[], bool],
        images: ImageInputs | None = None,
        no_images_because: str = "",
    ) -> BridgeOutcome:
        """Build the bridge after a turn whose last sampled id is `last_id` (-1 if it has none).

        `ends_in_reasoning` is called only if the turn was cut, and `earlier` is used only if the bridge depends on it.

        Raises:
            MessagesError: the turn is malformed.
            ToolDefinitionError: the tools are not a list of schemas.
        """
        try:
            check_messages([assistant])
            turn = self._build_turn(assistant)
            shape = self._build_shape(turn, new_messages)
            loaded = _load_new_images(new_messages, images, no_images_because)
            with self._lock:
                self._check_keys(assistant)
                certificate = self._certificates.get(shape, tools, earlier, assistant)
                self._check_unique_ids(turn, certificate, earlier or ())
                effect = certificate.get_effect(assistant)
                self._check_policy(effect)
                window = self._render_window(turn, new_messages, certificate, tools)
                if certificate.depends_on_turn:
                    self._check_turn(assistant, window, certificate)
                window = self._count_on(window, certificate, earlier or ())
                start = self._find_start(window, last_id, ends_in_reasoning)
                return self._encode(window, start, effect, loaded, images)
        except BridgeRefusedError as error:
            return error.refusal

    def certificates(self) -> tuple[CertificateRecord, ...]:
        """The examinations that are still kept, oldest first."""
        with self._lock:
            return self._certificates.records()

    def revoke(
        self, new_messages: Sequence[Message], *, assistant: Message, tools: Sequence[ToolSchema], detail: str
    ) -> None:
        """Refuse bridges of this shape from now on, whatever the tools (if any), because a full rendering differed."""
        shape = self._build_shape(self._build_turn(assistant), new_messages)
        with self._lock:
            self._certificates.revoke(shape, tools, detail)

    def _build_turn(self, assistant: Message) -> WindowTurn:
        if has_images(assistant.get("content")):
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, "a sampled turn has no images")
        calls = tuple(
            (call["function"]["name"], str(call.get("id") or "")) for call in assistant.get("tool_calls") or ()
        )
        if not self._message_format.renders_calls:
            # To this template, calls are part of the text.
            text = TextKind.WORDS if calls else TextKind.of(get_text(assistant.get("content")))
            return WindowTurn(calls=(), text=text)
        return WindowTurn(calls=calls, text=TextKind.of(get_text(assistant.get("content"))))

    def _build_shape(self, turn: WindowTurn, new_messages: Sequence[Message]) -> BridgeShape:
        try:
            check_messages(new_messages)
        except MessagesError as error:
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
        call_numbers = {call_id: k for k, (_, call_id) in reversed(list(enumerate(turn.calls)))}
        return BridgeShape(
            num_calls=len(turn.calls),
            text=turn.text,
            new_messages=tuple(self._build_new_message_shape(message, call_numbers) for message in new_messages),
        )

    def _build_new_message_shape(self, message: Message, call_numbers: Mapping[str, int]) -> NewMessageShape:
        role, call_id = message["role"], message.get("tool_call_id")
        if role == "assistant":
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, "an assistant message cannot extend a sampled turn")
        if self._encoder.spells_control(role):
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, f"the role {role!r} has a control token in it")
        if call_id is not None and call_id not in call_numbers and self._message_format.renders_calls:
            raise BridgeRefusedError(
                RefusalReason.BAD_EXTENSION, f"tool_call_id {call_id!r} is not one of the turn's {list(call_numbers)}"
            )
        keys = frozenset(key for key in ("name", "tool_call_id") if message.get(key) is not None)
        content = message.get("content")
        return NewMessageShape(
            role=role,
            answered_call=call_numbers.get(call_id or "", -1),
            keys=keys,
            parts=_get_part_kinds(content) if has_images(content) else (),
        )

    def _check_policy(self, effect: HistoryEffect) -> None:
        if self._policy is HistoryPolicy.TEMPLATE and effect is not HistoryEffect.KEPT:
            raise BridgeRefusedError(
                RefusalReason.REWRITES_HISTORY,
                f"the template's effect on what came before is {effect.value!r}, and history='template'",
            )

    def _render_window(
        self, turn: WindowTurn, new_messages: Sequence[Message], certificate: Certificate, tools: Sequence[ToolSchema]
    ) -> _Window:
        tools = tools if certificate.needs_tools else ()
        try:
            converted = self._message_format.convert(new_messages)
        except MessagesError as error:
            raise BridgeRefusedError(RefusalReason.UNSUPPORTED, f"new {error}") from None
        message = turn.build_message()
        sentinels = turn.get_sentinels(shows_text=certificate.shows_text)
        history_class = certificate.history_class
        text = self._windows.render_window(message, converted, tools=tools, history_class=history_class)
        spans = self._find_spans(text, message, converted, tools, history_class)
        if spans is None:
            named = {"tool_calls": message.get("tool_calls")}
            if any(map(self._encoder.may_forge, find_outside_strings([named, *converted], tools))):
                raise BridgeRefusedError(
                    RefusalReason.UNSAFE_TEXT, "the template rewrites text that has a control token in it"
                )
            spans = []
        turn_end = self._windows.find_turn_end(text, sentinels)
        if any(span.start < turn_end.stop and turn_end.start < span.stop for span in spans):
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, "a call's name or id spells the end of the turn")
        return _Window(
            text=text,
            spans=spans,
            turn_end=turn_end,
            turn=message,
            sentinels=sentinels,
            new_messages=converted,
            tools=tools,
        )

    def _check_keys(self, assistant: Message) -> None:
        """Refuse a turn with something else in it that the template reads: a window does not have it."""
        known = {"role", "content", "tool_calls", "reasoning_content", self._message_format.reasoning_key}
        if keys := sorted(key for key in self._keys - known if assistant.get(str(key)) is not None):
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED, f"the template reads {keys} of the turn, which a sampled turn does not have"
            )

    def _check_turn(self, assistant: Message, window: _Window, certificate: Certificate) -> None:
        """Compare the window with one of the turn as it is, after a longer history.

        For templates that read something of a turn or of a new message that no panel can vary. Raises
        `BridgeRefusedError` if the text after the turn differs.
        """
        if certificate.history_class.counted is not None:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, "the text after the turn may depend on a count and on this turn"
            )
        [turn] = self._message_format.convert([assistant])
        text = self._windows.render_window(
            cast(Message, turn),
            window.new_messages,
            tools=window.tools,
            history_class=certificate.history_class,
            has_long_prefix=True,
        )
        num_own = sum(map(self._windows.count_turn_ends, iterate_strings(assistant)))
        long_text = self._windows.render_window(
            window.turn,
            window.new_messages,
            tools=window.tools,
            history_class=certificate.history_class,
            has_long_prefix=True,
        )
        num_more = self._windows.count_turn_ends(text) - self._windows.count_turn_ends(long_text)
        if not text.endswith(window.text[window.turn_end.start :]) or not 0 <= num_more <= num_own:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, "the text after the turn depends on what this turn says"
            )

    def _count_on(self, window: _Window, certificate: Certificate, earlier: Sequence[Message]) -> _Window:
        """The window with the numbers that it would have after this history, if the certificate has any."""
        history_class = certificate.history_class
        if history_class.counted is None:
            return window
        prefixes = [self._windows.get_prefix(history_class, is_longer=is_longer) for is_longer in (False, True)]
        old, other = (count_messages(prefix, history_class.counted) for prefix in prefixes)
        longer = self._windows.render_window(
            window.turn,
            window.new_messages,
            tools=window.tools,
            history_class=history_class,
            has_long_prefix=True,
        )
        end = window.turn_end
        longer_end = self._windows.find_turn_end(longer, window.sentinels)
        numbers = find_numbers(window.text[end.start :], old, longer[longer_end.start :], other)
        if numbers is None or numbers.offsets != certificate.number_offsets:
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED, "the numbers in the text after the turn cannot be told from its digits"
            )
        count = self._certificates.histories.read(earlier).counts[history_class.counted]
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

    def _check_unique_ids(self, turn: WindowTurn, certificate: Certificate, earlier: Sequence[Message]) -> None:
        """Refuse a turn whose call ids are not unique, if the template looks up calls by id."""
        if not certificate.needs_unique_ids:
            return
        ids = [call_id for _, call_id in turn.calls]
        reused = self._certificates.histories.find_reused_id(earlier, ids) if earlier else None
        if reused is not None or "" in ids or len(set(ids)) < len(ids):
            where = "" if reused is None else f", and an earlier call has {reused!r}"
            raise BridgeRefusedError(
                RefusalReason.BAD_EXTENSION,
                f"the template looks calls up by id, and the turn has the ids {ids}{where}: make them unique",
            )

    def _find_spans(
        self,
        text: str,
        turn: Message,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema],
        history_class: HistoryClass,
    ) -> list[Span] | None:
        """Find the text from outside in `text`; None if the template treats marked text differently."""
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
        except BridgeRefusedError:
            return None
        return read_marks(marked, text)

    def _find_start(self, window: _Window, last_id: int, ends_in_reasoning: Callable[[], bool]) -> _Start:
        turn_end = window.turn_end
        last = self._encoder.control.get_text(last_id)
        if last is not None and last in self._ends.tokens - self._ends.ambiguous:
            if (position := self._find_sampled_end(window, last)) is not None:
                return _Start(position=position, anchor=last)
            if last in self._ends.headers:
                return _Start(position=turn_end.start, num_taken_back=1)
            return _Start(position=turn_end.start, closing=Closing.FOREIGN_STOP)
        if last_id in self._stop_token_ids:
            return _Start(position=turn_end.start, closing=Closing.FOREIGN_STOP)
        if self._reasoning is not None and ends_in_reasoning():
            text = self._reasoning.close_text
            return _Start(position=turn_end.start, closing=Closing.REASONING, text_before=text, anchor=turn_end.token)
        return _Start(position=turn_end.start, closing=Closing.TRUNCATED)

    def _find_sampled_end(self, window: _Window, last: str) -> int | None:
        """The end of the sampled id `last` in the window's end of the turn; None if the template writes another end."""
        turn_end = window.turn_end
        if last == turn_end.token or self._ends.last_turn_ends.get(last) == turn_end.token:
            return turn_end.stop
        for ending in self._ends.endings:
            if last in ending and window.text.startswith(ending, turn_end.start):
                return turn_end.start + ending.index(last) + len(last)
        return None

    def _encode(
        self,
        window: _Window,
        start: _Start,
        history: HistoryEffect,
        images: Sequence[MessageImage],
        inputs: ImageInputs | None,
    ) -> Bridge:
        """Encode the window from `start` on, after a control token: to the tokenizer it is not the start of a text."""
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
            num_taken_back=start.num_taken_back,
            history=history,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A rendered window, the spans of text from outside in it, and the end of the turn."""

    text: str
    spans: list[Span]
    turn_end: TurnEndMatch
    turn: Message
    sentinels: tuple[str, ...]
    new_messages: Sequence[Mapping[str, Any]]
    """In the template's format."""
    tools: Sequence[ToolSchema]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    position: int
    anchor: str = ""
    """A control token to encode the bridge after; its id is not part of the bridge."""
    text_before: str = ""
    closing: Closing = Closing.NONE
    num_taken_back: int = 0


def _load_new_images(
    new_messages: Sequence[Message], images: ImageInputs | None, no_images_because: str
) -> list[MessageImage]:
    try:
        return load_images(new_messages, images, no_images_because=no_images_because)
    except (MessagesError, ImageError) as error:
        raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None


def _get_part_kinds(parts: Any) -> tuple[ContentKind, ...]:
    return tuple(ContentKind.IMAGE if part["type"] in IMAGE_TYPES else ContentKind.TEXT for part in parts)
