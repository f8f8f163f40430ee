r"""The window: a user message, the assistant turn that ended, the new messages, the next generation prompt.

It is rendered in place of the conversation, so that the cost of a bridge does not depend on the history. The turn's
text and arguments are sentinels. The names and ids of its calls are real, because some templates write them into the
headers of tool results.

    <|im_start|>user\nXq7User<|im_end|>\n<|im_start|>assistant\nWq7Text<|im_end|>\n<|im_start|>user\nhi<|im_end|>...
                                                              text_stop ´`-- end ---´
                                                                         `- bridge_text ----------------------------...
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY, HistoryClass
from unbroken.rendering.bridge.histories.panel import build_history
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.turn_ends import TurnEnds
from unbroken.rendering.message_format import PROBE_ARGUMENT, PROBE_USER, MessageFormat, probe_call

TURN_TEXT, TURN_KEY, TURN_ARGUMENT, TURN_REASONING = "Wq7Text", "Wq7Key", "Wq7Argument", "Wq7Reasoning"


class TextKind(StrEnum):
    """The kind of a turn's text."""

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
    """The parts of an assistant turn that a window depends on."""

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
        """Build the turn as a message, with sentinels for the text and arguments that are not given.

        A turn without calls gets a sentinel as text even if its content is empty, to mark its end.
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
        """The sentinels of the last call's argument and of the text: the turn ends after both.

        Without `shows_text` the template leaves out text beside calls, and its sentinel with it.
        """
        arguments = (f"{TURN_ARGUMENT}{len(self.calls) - 1}z",) if self.calls else ()
        return (*arguments, *((TURN_TEXT,) if self._has_sentinel and shows_text else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEndMatch:
    """The end of the turn in a rendered text: the characters [start, stop) of a control token."""

    token: str
    text_stop: int
    start: int
    stop: int


class RendersMessages(Protocol):
    """A chat template, or what stands for it; see `ChatTemplate.render`."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool
    ) -> str:
        """Render a conversation."""
        ...


class WindowRenderer:
    """Renders windows and whole conversations, and finds the end of the turn in them.

    `placeholder` is the text that the template writes for an image; None for a text model.
    """

    def __init__(
        self,
        template: RendersMessages,
        message_format: MessageFormat,
        ends: TurnEnds,
        *,
        placeholder: str | None = None,
    ) -> None:
        self.placeholder = placeholder
        self.message_format = message_format
        self._template = template
        longest_first = sorted(ends.tokens, key=len, reverse=True)
        self._end_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._prefixes: dict[tuple[HistoryClass, bool], list[Message]] = {}
        self._converted_prefixes: dict[tuple[HistoryClass, bool], list[dict[str, Any]]] = {}
        self.num_renderings = 0
        """How many were asked for."""

    def with_template(self, template: RendersMessages) -> WindowRenderer:
        """The same for another form of the template."""
        other = copy.copy(self)
        other._template = template
        other.num_renderings = 0
        return other

    def render_window(
        self,
        turn: Message,
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass = ANY_HISTORY,
        has_long_prefix: bool = False,
    ) -> str:
        """Render a window; `new_messages` are in the template's message format already.

        Raises `BridgeRefusedError` if the template refuses this sequence of roles.
        """
        try:
            before = self._convert_prefix(history_class, is_longer=has_long_prefix)
            [converted] = self.message_format.convert([turn])
            self.num_renderings += 1
            return self._template.render([*before, converted, *new_messages], tools=tools, add_generation_prompt=True)
        except TemplateError as error:
            raise BridgeRefusedError(RefusalReason.TEMPLATE_RAISES, str(error)) from None

    def get_prefix(self, history_class: HistoryClass, *, is_longer: bool = False) -> list[Message]:
        """The shortest history of a class, or a longer one, in which more is counted.

        Its words differ from the panel's, so that a quotation of either is noticed.
        """
        key = (history_class, is_longer)
        if key not in self._prefixes:
            spelling = history_class.get_prefix_spelling(
                renders_calls=self.message_format.renders_calls, is_longer=is_longer
            )
            self._prefixes[key] = build_history(
                spelling, text=PROBE_USER, argument=PROBE_ARGUMENT, call_id_prefix="prefix"
            )
        return self._prefixes[key]

    def _convert_prefix(self, history_class: HistoryClass, *, is_longer: bool) -> list[dict[str, Any]]:
        key = (history_class, is_longer)
        if key not in self._converted_prefixes:
            self._converted_prefixes[key] = self.message_format.convert(
                self.get_prefix(history_class, is_longer=is_longer)
            )
        return self._converted_prefixes[key]

    def render_conversation(
        self,
        history: Sequence[Message],
        turn: Message | None,
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema],
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation; `new_messages` are converted already. Raises `TemplateError` if it is refused."""
        self.num_renderings += 1
        before = self.message_format.convert([*history, *([] if turn is None else [turn])])
        return self._template.render([*before, *new_messages], tools=tools, add_generation_prompt=add_generation_prompt)

    def find_turn_end(self, text: str, sentinels: Sequence[str]) -> TurnEndMatch:
        """Find the first turn-ending token after the first occurrences of the turn's sentinels.

        New messages may contain the same words, but they come after the turn. Raises `BridgeRefusedError` if the turn
        is not in the text, or nothing ends it.
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
        """Count the turn-ending tokens in `text`."""
        return len(self._end_pattern.findall(text))
