r"""The window: a user message, the assistant turn that ended, the new messages, the next generation prompt.

Rendering it instead of the conversation is what makes the bridge's cost independent of the history. The turn's text
and arguments are sentinels, as only what follows them matters; its calls' names and ids are real, as some templates
write them into the answers' headers.

    <|im_start|>user\nXq7User<|im_end|>\n<|im_start|>assistant\nWq7Text<|im_end|>\n<|im_start|>user\nhi<|im_end|>...
                                                              text_stop ´`-- end ---´`- bridge_text -----------------...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.panel import HistoryClass, build_history
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import PROBE_ARGUMENT, PROBE_USER, MessageFormat, probe_call

TURN_TEXT, TURN_KEY, TURN_ARGUMENT, TURN_REASONING = "Wq7Text", "Wq7Key", "Wq7Argument", "Wq7Reasoning"


class TextKind(StrEnum):
    """What content a turn has."""

    EMPTY = "empty"
    BLANK = "blank"
    """White space only."""
    WORDS = "words"

    @classmethod
    def of(cls, text: str) -> TextKind:
        """The kind of a text."""
        if not text:
            return cls.EMPTY
        return cls.WORDS if text.strip() else cls.BLANK


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTurn:
    """What of an assistant turn the window shows."""

    calls: tuple[tuple[str, str], ...]
    """Name and id of each call."""
    text: TextKind

    def build_message(
        self,
        *,
        text: str | None = None,
        arguments: Sequence[Mapping[str, Any]] | None = None,
        with_reasoning: bool = False,
    ) -> Message:
        """The turn as a message, its text and arguments sentinels where no others are given.

        The text of a turn without calls is a sentinel even if it has none: its end is found by that.
        """
        if text is None:
            text = TURN_TEXT if self._has_sentinel else "\n" if self.text is TextKind.BLANK else ""
        message: Message = {"role": "assistant", "content": text}
        if self.calls:
            message["tool_calls"] = [
                probe_call(
                    name, call_id, {TURN_KEY: f"{TURN_ARGUMENT}{k}z"} if arguments is None else dict(arguments[k])
                )
                for k, (name, call_id) in enumerate(self.calls)
            ]
        if with_reasoning:
            message["reasoning_content"] = TURN_REASONING
        return message

    @property
    def _has_sentinel(self) -> bool:
        return not self.calls or self.text is TextKind.WORDS

    def get_sentinels(self, *, shows_text: bool) -> tuple[str, ...]:
        """The last call's argument and the text: the turn ends after the later one.

        Not `shows_text`: the template leaves out text beside calls, so that is not to be looked for.
        """
        arguments = (f"{TURN_ARGUMENT}{len(self.calls) - 1}z",) if self.calls else ()
        return (*arguments, *((TURN_TEXT,) if self._has_sentinel and shows_text else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEndMatch:
    """Where in a rendered text the turn's end stands."""

    token: str
    """The control token that ends the turn."""
    text_stop: int
    """End of the turn's own text."""
    start: int
    """Start of the token."""
    stop: int


class WindowRenderer:
    """Renders windows, and conversations in their place, and finds the end of the turn in them.

    Args:
        template: the template.
        forms: its forms.
        ends: how it ends turns.
        placeholder: what it writes for an image; None for a text model.
    """

    def __init__(
        self, template: ChatTemplate, message_format: MessageFormat, ends: TurnEnds, *, placeholder: str | None = None
    ) -> None:
        self.placeholder = placeholder
        self._template = template
        self._message_format = message_format
        longest_first = sorted(ends.tokens, key=len, reverse=True)
        self._end_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._prefixes = {
            history_class: message_format.convert(_window_prefix(history_class, message_format))
            for history_class in HistoryClass
        }
        self.num_renderings = 0
        """How many texts this object has rendered: what certificates cost."""

    def render_window(
        self,
        turn: Message,
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass = HistoryClass.ANY,
    ) -> str:
        """The text of a window; `new_messages` are in the template's form already.

        Raises:
            BridgeRefusedError: the template refuses this sequence of roles.
        """
        try:
            return self.render_conversation(self._prefixes[history_class], turn, new_messages, tools=tools)
        except TemplateError as error:
            raise BridgeRefusedError(RefusalReason.TEMPLATE_RAISES, str(error)) from None

    def render_conversation(
        self,
        history: Sequence[Mapping[str, Any]],
        turn: Message | None,
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema],
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a whole conversation, to compare a window with; all but the turn is in the template's form.

        Raises:
            TemplateError: the template refuses it.
        """
        self.num_renderings += 1
        messages = [*history, *self._message_format.convert([turn] if turn is not None else []), *new_messages]
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def find_turn_end(self, text: str, sentinels: Sequence[str]) -> TurnEndMatch:
        """The end of the turn: the first ending token after the turn's sentinels, of which `text` holds the first ones.

        New messages may hold the same words, but stand behind the turn.

        Raises:
            BridgeRefusedError: the turn is not in the text, or nothing ends it.
        """
        positions = [text.find(sentinel) for sentinel in sentinels]
        if -1 in positions:
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template leaves out the turn or its last call")
        text_stop = max(start + len(sentinel) for start, sentinel in zip(positions, sentinels, strict=True))
        match = self._end_pattern.search(text, text_stop)
        if match is None:
            raise BridgeRefusedError(RefusalReason.UNDERIVABLE, "no control token ends the assistant turn")
        return TurnEndMatch(token=match.group(), text_stop=text_stop, start=match.start(), stop=match.end())

    def count_turn_ends(self, text: str) -> int:
        """How many tokens that end a turn are in `text`."""
        return len(self._end_pattern.findall(text))


def _window_prefix(history_class: HistoryClass, message_format: MessageFormat) -> list[Message]:
    """The shortest history of a class. Its words are not the panel's, so that none can be quoted unnoticed."""
    result = "" if history_class is not HistoryClass.WITH_RESULTS else "ct" if message_format.renders_calls else "at"
    return build_history(f"u{result}", text=PROBE_USER, argument=PROBE_ARGUMENT, call_id_prefix="prefix")
