"""The window of one example, and checks that whole conversations have the same text after the turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.panel import HistoryClass
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import ShapeExample
from unbroken.rendering.bridge.window import TURN_ARGUMENT, TURN_KEY, TURN_TEXT, WindowRenderer
from unbroken.rendering.message_format import PROBE_ARGUMENT, PROBE_USER, MessageFormat

TemplateMessages = Sequence[Mapping[str, Any]]


class ProbeWindow:
    """The window of one example after one class of histories.

    Raises:
        BridgeRefusedError: the template refuses the example, leaves the turn out, or nothing ends the turn.
    """

    def __init__(
        self,
        windows: WindowRenderer,
        message_format: MessageFormat,
        example: ShapeExample,
        *,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass,
    ) -> None:
        self._windows = windows
        self._message_format = message_format
        self._tools = tools
        self._history_class = history_class
        self._new_messages = message_format.convert(example.new_messages)
        self.example = example
        self.turn = example.turn.build_message()
        self.text = windows.render_window(self.turn, self._new_messages, tools=tools, history_class=history_class)
        self.shows_text = not example.turn.calls or TURN_TEXT in self.text
        """Whether text beside calls is rendered."""
        self.sentinels = example.turn.get_sentinels(shows_text=self.shows_text)
        self.turn_end = windows.find_turn_end(self.text, self.sentinels)
        self.bridge_text = self.text[self.turn_end.start :]

    def of(self, example: ShapeExample | None = None, tools: Sequence[ToolSchema] | None = None) -> ProbeWindow:
        """The same of another example, or with other tools."""
        tools = self._tools if tools is None else tools
        return ProbeWindow(
            self._windows, self._message_format, example or self.example, tools=tools, history_class=self._history_class
        )

    def check_new_messages(self) -> None:
        """The window holds each new message once, in order, behind the turn, and nothing of the turn after its end.

        Of the texts and images of one message the template may write the images first.

        Raises:
            BridgeRefusedError: it does not.
        """
        text, turn_end = self.text, self.turn_end
        sentinels = [sentinel for texts in self.example.sentinels for sentinel in texts]
        images = self._find_images()
        if any(text.count(sentinel) > 1 for sentinel in self.sentinels):
            raise BridgeRefusedError(RefusalReason.REORDERS_TURN, "the template repeats text of the turn")
        positions = [text.find(sentinel) for sentinel in sentinels]
        if -1 in positions or any(text.count(sentinel) > 1 for sentinel in sentinels):
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template drops or repeats a new message")
        first = min([*positions, *images])
        if first < turn_end.text_stop:
            raise BridgeRefusedError(RefusalReason.REORDERS_TURN, "text of the turn comes after the new messages")
        if first < turn_end.start:
            raise BridgeRefusedError(RefusalReason.UNDERIVABLE, "nothing ends the turn before the new messages")
        if positions != sorted(positions) or not self._is_among_own_text(positions, images):
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template reorders the new messages")
        words = (PROBE_USER, PROBE_ARGUMENT, TURN_TEXT, TURN_KEY, TURN_ARGUMENT)
        if quoted := [word for word in words if word in self.bridge_text]:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the text after the turn quotes what is before it: {quoted}"
            )

    def _find_images(self) -> list[int]:
        """Where the window has a placeholder.

        Raises:
            BridgeRefusedError: it has not one for each image.
        """
        placeholder = self._windows.placeholder
        if placeholder is None:
            return []
        found = [match.start() for match in re.finditer(re.escape(placeholder), self.text)]
        if len(found) != sum(self.example.num_images):
            raise BridgeRefusedError(
                RefusalReason.DROPS_MESSAGE,
                f"the template writes {len(found)} image placeholders for {sum(self.example.num_images)} images of the "
                "new messages",
            )
        return found

    def _is_among_own_text(self, texts: Sequence[int], images: Sequence[int]) -> bool:
        """Whether each message's images stand behind the text of those before it and before that of those after."""
        num_texts = num_images = 0
        for own_texts, own_images in zip(self.example.sentinels, self.example.num_images, strict=True):
            places = images[num_images : num_images + own_images]
            before, behind = texts[:num_texts], texts[num_texts + len(own_texts) :]
            if places and (max(before, default=-1) > places[0] or min(behind, default=len(self.text)) < places[-1]):
                return False
            num_texts += len(own_texts)
            num_images += own_images
        return True

    def check_conversation(self, history: TemplateMessages, turn: Message, *, description: str) -> bool:
        """Whether the template renders this conversation; `description` is how it is told of in the refusal.

        Raises:
            BridgeRefusedError: it does, with other bridge_text.
        """
        try:
            text = self._windows.render_conversation(history, turn, self._new_messages, tools=self._tools)
        except TemplateError:
            return False
        if text[self._windows.find_turn_end(text, self.sentinels).start :] != self.bridge_text:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the text after the turn is another one after {description}"
            )
        return True

    def count_turn_ends(self, history: TemplateMessages, turn: Message | None = None) -> int | None:
        """The turn ends of a conversation, by default of the example's turn; None if the template refuses it.

        Raises:
            BridgeRefusedError: it does not end with the bridge_text.
        """
        turn = self.turn if turn is None else turn
        try:
            text = self._windows.render_conversation(history, turn, self._new_messages, tools=self._tools)
        except TemplateError:
            return None
        if not text.endswith(self.bridge_text):
            raise _other_after(turn)
        return self._windows.count_turn_ends(text)

    def check_turns(self, history: TemplateMessages, turns: Sequence[Message], num_usual: int | None) -> None:
        """Like `check_conversation` for turns without the sentinels, whose text the template may cut or rewrite.

        `num_usual` is the number of turn ends for a turn with them. Text between a turn's end and the bridge would add
        one more end, as the bridge begins with one.

        Raises:
            BridgeRefusedError: the bridge_text is another one after one of the turns.
        """
        if num_usual is None:
            return
        for turn in turns:
            found = self.count_turn_ends(history, turn)
            own = self._windows.count_turn_ends(str(turn["content"]))
            if found is not None and not 0 <= found - num_usual <= own:
                raise _other_after(turn)

    def render_with_and_without(self, history: TemplateMessages, turn: Message) -> tuple[str, str, str] | None:
        """What the template makes of the conversation up to the turn, three times.

        The prompt before the turn; history and turn, up to the turn's end, when nothing follows; the same when the new
        messages follow. None if it refuses one of them.
        """
        try:
            prompt = self._windows.render_conversation(history, None, (), tools=self._tools)
            last = self._windows.render_conversation(history, turn, (), tools=self._tools, add_generation_prompt=False)
            full = self._windows.render_conversation(history, turn, self._new_messages, tools=self._tools)
            return prompt, self._up_to_end(last), self._up_to_end(full)
        except (TemplateError, BridgeRefusedError):
            return None

    def _up_to_end(self, text: str) -> str:
        try:
            return text[: self._windows.find_turn_end(text, self.sentinels).start]
        except BridgeRefusedError as error:
            if error.refusal.reason is RefusalReason.UNDERIVABLE:  # nothing ends a last turn whose end is a header
                return text
            raise


def _other_after(turn: Message) -> BridgeRefusedError:
    return BridgeRefusedError(
        RefusalReason.HISTORY_DEPENDENT,
        f"the text after the turn is another one if the turn says {str(turn['content'])[:40]!r} and calls "
        f"{str(turn.get('tool_calls', 'nothing'))[:200]}",
    )
