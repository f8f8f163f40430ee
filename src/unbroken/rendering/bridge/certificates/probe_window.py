"""The window of one example, and checks that whole conversations continue the turn with the same text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.histories.history_class import HistoryClass, count_messages
from unbroken.rendering.bridge.numbers import NumberedText, find_numbers
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import ShapeExample
from unbroken.rendering.bridge.window import TURN_ARGUMENT, TURN_KEY, TURN_TEXT, WindowRenderer
from unbroken.rendering.message_format import PROBE_ARGUMENT, PROBE_USER


class ProbeWindow:
    """The window of one example after one class of histories.

    Raises `BridgeRefusedError` if the template refuses the example, leaves the turn out, or nothing ends the turn.
    """

    def __init__(
        self,
        windows: WindowRenderer,
        example: ShapeExample,
        *,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass,
    ) -> None:
        self._windows = windows
        self.tools = tools
        self.history_class = history_class
        self._new_messages = windows.message_format.convert(example.new_messages)
        self.example = example
        self.turn = example.turn.build_message()
        self.text = windows.render_window(self.turn, self._new_messages, tools=tools, history_class=history_class)
        self.shows_text = not example.turn.calls or TURN_TEXT in self.text
        self.sentinels = example.turn.get_sentinels(shows_text=self.shows_text)
        self.turn_end = windows.find_turn_end(self.text, self.sentinels)
        self.bridge_text = self.text[self.turn_end.start :]
        self._numbers = None if history_class.counted is None else self._find_numbers(history_class)

    @property
    def number_offsets(self) -> tuple[int, ...]:
        """What the numbers in the bridge add to the history's count."""
        return () if self._numbers is None else self._numbers.offsets

    def _find_numbers(self, history_class: HistoryClass) -> NumberedText:
        """Find the numbers that count. Raises `BridgeRefusedError` if something else changes with a longer prefix."""
        assert history_class.counted is not None
        longer = self._windows.render_window(
            self.turn, self._new_messages, tools=self.tools, history_class=history_class, has_long_prefix=True
        )
        prefixes = [self._windows.get_prefix(history_class, is_longer=is_longer) for is_longer in (False, True)]
        count, other_count = (count_messages(prefix, history_class.counted) for prefix in prefixes)
        other = longer[self._windows.find_turn_end(longer, self.sentinels).start :]
        numbers = find_numbers(self.bridge_text, count, other, other_count)
        if numbers is None or not numbers.offsets:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"no numbers in the text after the turn count {history_class.counted}"
            )
        return numbers

    def _get_expected(self, history: Sequence[Message]) -> str:
        """The text from the turn's end on, after this history."""
        if self._numbers is None or self.history_class.counted is None:
            return self.bridge_text
        return self._numbers.write(count_messages(history, self.history_class.counted))

    def change(self, example: ShapeExample | None = None, tools: Sequence[ToolSchema] | None = None) -> ProbeWindow:
        """The window of another example, or with other tools."""
        tools = self.tools if tools is None else tools
        return ProbeWindow(self._windows, example or self.example, tools=tools, history_class=self.history_class)

    def check_new_messages(self) -> None:
        """Check that each new message comes once, in order, after the turn, and no text of the turn after its end.

        Raises `BridgeRefusedError` otherwise. Within one message the template may write images before texts.
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
        if positions != sorted(positions) or not self._are_images_in_order(positions, images):
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template reorders the new messages")
        words = (PROBE_USER, PROBE_ARGUMENT, TURN_TEXT, TURN_KEY, TURN_ARGUMENT)
        if quoted := [word for word in words if word in self.bridge_text]:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the text after the turn quotes what is before it: {quoted}"
            )

    def _find_images(self) -> list[int]:
        """Find the placeholders of images; raises `BridgeRefusedError` if there is not one for each image."""
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

    def _are_images_in_order(self, texts: Sequence[int], images: Sequence[int]) -> bool:
        """Whether each message's images come after the texts of earlier messages and before those of later ones."""
        num_texts = num_images = 0
        for own_texts, own_images in zip(self.example.sentinels, self.example.num_images, strict=True):
            places = images[num_images : num_images + own_images]
            before, after = texts[:num_texts], texts[num_texts + len(own_texts) :]
            if places and (max(before, default=-1) > places[0] or min(after, default=len(self.text)) < places[-1]):
                return False
            num_texts += len(own_texts)
            num_images += own_images
        return True

    def check_conversation(self, history: Sequence[Message], turn: Message, *, description: str) -> bool:
        """Compare a whole conversation with the window. False if the template refuses the conversation.

        Raises `BridgeRefusedError` with the `description` if its text after the turn differs.
        """
        try:
            text = self._windows.render_conversation(history, turn, self._new_messages, tools=self.tools)
        except TemplateError:
            return False
        if text[self._windows.find_turn_end(text, self.sentinels).start :] != self._get_expected(history):
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the text after the turn changes after {description}"
            )
        return True

    def count_turn_ends(self, history: Sequence[Message], turn: Message | None = None) -> int | None:
        """Count the turn ends in a conversation, by default with the example's turn; None if the template refuses it.

        Raises `BridgeRefusedError` if the conversation does not end with the window's bridge text.
        """
        turn = self.turn if turn is None else turn
        try:
            text = self._windows.render_conversation(history, turn, self._new_messages, tools=self.tools)
        except TemplateError:
            return None
        if not text.endswith(self._get_expected(history)):
            raise _make_difference_error(turn)
        return self._windows.count_turn_ends(text)

    def check_turns(self, history: Sequence[Message], turns: Sequence[Message], num_usual: int | None) -> None:
        """Like `check_conversation`, for turns without sentinels, whose text the template may cut or rewrite.

        `num_usual` is `count_turn_ends` for the turn with sentinels. Text between the turn's end and the bridge text
        would add one more end, because the bridge text begins with one.
        """
        if num_usual is None:
            return
        for turn in turns:
            found = self.count_turn_ends(history, turn)
            num_own = self._windows.count_turn_ends(str(turn["content"]))
            if found is not None and not 0 <= found - num_usual <= num_own:
                raise _make_difference_error(turn)

    def render_with_and_without(self, history: Sequence[Message], turn: Message) -> tuple[str, str, str] | None:
        """Render history and turn without and with the new messages after them.

        Returns the prompt before the turn, then history and turn up to the turn's end, first with nothing after them,
        then with the new messages after them. None if the template refuses one of the three.
        """
        try:
            prompt = self._windows.render_conversation(history, None, (), tools=self.tools)
            last = self._windows.render_conversation(history, turn, (), tools=self.tools, add_generation_prompt=False)
            full = self._windows.render_conversation(history, turn, self._new_messages, tools=self.tools)
            return prompt, self._cut_at_turn_end(last), self._cut_at_turn_end(full)
        except (TemplateError, BridgeRefusedError):
            return None

    def _cut_at_turn_end(self, text: str) -> str:
        try:
            return text[: self._windows.find_turn_end(text, self.sentinels).start]
        except BridgeRefusedError as error:
            if error.refusal.reason is RefusalReason.UNDERIVABLE:  # the next message's header would end it
                return text
            raise


def _make_difference_error(turn: Message) -> BridgeRefusedError:
    return BridgeRefusedError(
        RefusalReason.HISTORY_DEPENDENT,
        f"the text after the turn changes if the turn says {str(turn['content'])[:40]!r} and calls "
        f"{str(turn.get('tool_calls', 'nothing'))[:200]}",
    )
