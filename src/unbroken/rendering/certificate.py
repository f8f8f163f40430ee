"""The certificate: evidence, once per shape of a turn and its new messages, that a window's glue is every history's.

The window and a panel of synthetic histories are rendered with sentinels for all text. What follows the turn's end
must be byte-identical in all of them, and hold each new message once and in order. Text that the template may compare
with, as its syntax tree tells, is put into every role as well, and the turn is made empty, short, long, and its calls'
arguments none and many. It is evidence and no proof: a template keyed on something outside the panel passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.forms import PROBE_NAMES, PROBE_USER, TemplateForms
from unbroken.rendering.panel import (
    build_history,
    counted_histories,
    histories,
    length_of_long_text,
    texts_of_lengths,
)
from unbroken.rendering.refused import BridgeRefusedError
from unbroken.rendering.window import TURN_ARGUMENT, TURN_KEY, TURN_TEXT, Turn, TurnText, WindowRenderer

_CALL_ID_PREFIX = "turn"
_MOST_CONSTANTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessageShape:
    """What a certificate depends on in a new message: all but its text."""

    role: str
    answers: int
    """The turn's call that a tool message answers, -1 for none."""
    keys: frozenset[str]
    """Which of `name` and `tool_call_id` it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a certificate depends on in a turn and the new messages after it."""

    num_calls: int
    text: TurnText
    new_messages: tuple[NewMessageShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was found for one shape."""

    shows_text: bool
    """Whether text beside calls is rendered."""
    needs_tools: bool
    """Whether the tool schemas reach the glue; else the window is rendered without them, which is much cheaper."""
    needs_unique_ids: bool
    """Whether the template looks calls up by id in the whole conversation."""


class Certifier:
    """Issues certificates for one template."""

    def __init__(self, template: ChatTemplate, forms: TemplateForms, windows: WindowRenderer) -> None:
        self._forms = forms
        self._windows = windows
        self._integers = template.integers()
        self._literals = template.literals()
        self._cycle = "suctau" if forms.renders_calls else "suau"

    def certify(self, shape: Shape, tools: Sequence[ToolSchema]) -> Certificate:
        """Compare the window with the panel.

        Raises:
            BridgeRefusedError: they differ, or the template cannot render the shape.
        """
        if len(self._literals) + len(self._integers) > _MOST_CONSTANTS:
            raise BridgeRefusedError(
                RefusalReason.UNSUPPORTED,
                f"the template has {len(self._literals)} texts and {len(self._integers)} numbers to compare with, more "
                f"than the {_MOST_CONSTANTS} that are tried out",
            )
        case = self._case(shape, tools)
        glue = self._window_glue(case, tools)
        self._check_new_messages(case, glue, tools)
        self._check_histories(case, glue, tools)
        self._check_turns(case, glue, tools)
        self._check_literals(case, glue, tools)
        return Certificate(
            shows_text=case.shows_text,
            needs_tools=not self._is_same_without_tools(case, glue),
            needs_unique_ids=self._looks_up_ids(case, glue, tools),
        )

    def _case(self, shape: Shape, tools: Sequence[ToolSchema]) -> _Case:
        case = _Case.of(shape)
        text = self._windows.render(case.turn.message(), self._forms.conform(case.new_messages), tools=tools)
        return replace(case, shows_text=not case.turn.calls or TURN_TEXT in text)

    def _check_new_messages(self, case: _Case, glue: str, tools: Sequence[ToolSchema]) -> None:
        """Each sentinel once, in order, the turn before the new messages, and nothing of it in between."""
        text = self._windows.render(case.turn.message(), self._forms.conform(case.new_messages), tools=tools)
        slot = self._windows.locate(text, case.turn_sentinels)
        if any(text.count(sentinel) > 1 for sentinel in case.turn_sentinels):
            raise BridgeRefusedError(RefusalReason.REORDERS_TURN, "the template repeats text of the turn")
        positions = [text.find(sentinel) for sentinel in case.sentinels]
        if -1 in positions or any(text.count(sentinel) > 1 for sentinel in case.sentinels):
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template drops or repeats a new message")
        if positions[0] < slot.text_stop:
            raise BridgeRefusedError(RefusalReason.REORDERS_TURN, "text of the turn comes after the new messages")
        if positions[0] < slot.start:
            raise BridgeRefusedError(RefusalReason.UNDERIVABLE, "nothing ends the turn before the new messages")
        if positions != sorted(positions):
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template reorders the new messages")
        if quoted := [word for word in (PROBE_USER, TURN_TEXT, TURN_KEY, TURN_ARGUMENT) if word in glue]:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the text after the turn quotes what is before it: {quoted}"
            )

    def _check_histories(self, case: _Case, glue: str, tools: Sequence[ToolSchema]) -> None:
        turns = [case.turn.message()]
        if self._forms.reasoning_key is not None:
            turns.append(case.turn.message(with_reasoning=True))
        renders_calls = self._forms.renders_calls
        num_rendered = 0
        for spelling in histories(renders_calls=renders_calls):
            for turn in turns:
                history = self._history(spelling)
                num_rendered += self._compare(case, glue, history, turn, tools, told=f"the history {spelling!r}")
        if num_rendered == 0:
            raise BridgeRefusedError(RefusalReason.TEMPLATE_RAISES, "the template accepts this turn after no history")
        for spelling in counted_histories(renders_calls=renders_calls, integers=self._integers):
            told = f"{len(spelling)} messages"
            self._compare(case, glue, self._history(spelling), case.turn.message(), tools, told=told)

    def _check_turns(self, case: _Case, glue: str, tools: Sequence[ToolSchema]) -> None:
        """Other texts and arguments of the turn itself."""
        turns = [case.turn.message(text=text) for text in self._texts_of_turn(case.turn)]
        turns += [case.turn.message(arguments=arguments) for arguments in _arguments_of_turn(len(case.turn.calls))]
        for spelling in ("u", "su", self._cycle):
            history = self._history(spelling)
            self._compare_ends(case, glue, history, turns, case.turn.message(), tools)
            if self._forms.reasoning_key is not None and case.turn.text is TurnText.NONE and not case.turn.calls:
                usual = case.turn.message(with_reasoning=True)
                self._compare_ends(case, glue, history, [{**usual, "content": ""}], usual, tools)

    def _texts_of_turn(self, turn: Turn) -> Iterator[str]:
        if turn.text is TurnText.WORDS:
            yield from texts_of_lengths(self._integers)
        elif turn.text is TurnText.BLANK:
            yield from ("\n", " ", " \n\n ")
        elif not turn.calls:
            yield ""

    def _check_literals(self, case: _Case, glue: str, tools: Sequence[ToolSchema]) -> None:
        """Put what the template compares text with into the history, the turn and the new messages."""
        for literal in self._literals:
            for text in _texts_with(literal):
                told = f"the text {text!r}"
                for history in self._literal_histories(text):
                    self._compare(case, glue, history, case.turn.message(), tools, told=told)
                if case.turn.text is TurnText.WORDS:
                    said = (text, f"{text}{TURN_TEXT}", f"{TURN_TEXT}{text}")
                    turns = [case.turn.message(text=words) for words in said]
                    self._compare_ends(case, glue, self._history("u"), turns, case.turn.message(), tools)
                self._check_literal_in_new_messages(_with_text(case, text), tools, told)

    def _check_literal_in_new_messages(self, case: _Case, tools: Sequence[ToolSchema], told: str) -> None:
        try:
            glue = self._window_glue(case, tools)
        except BridgeRefusedError:
            return  # the same refusal meets these messages when they come
        for spelling in ("u", "su", self._cycle):
            self._compare(case, glue, self._history(spelling), case.turn.message(), tools, told=told)

    def _literal_histories(self, text: str) -> Iterator[list[Message]]:
        yield self._history("u", {"user": text})
        for role in ("system", "user", "assistant", "tool"):
            yield self._history(self._cycle, {role: text})

    def _is_same_without_tools(self, case: _Case, glue: str) -> bool:
        try:
            return self._window_glue(case, ()) == glue
        except BridgeRefusedError:
            return False

    def _looks_up_ids(self, case: _Case, glue: str, tools: Sequence[ToolSchema]) -> bool:
        """Whether an earlier call with the same id and another name changes the glue."""
        if not case.turn.calls:
            return False
        spelling = "u" + "ct" * (len(case.turn.calls) + 1)
        # The names alternate, so the first call is left out for each id to meet the other name.
        history = build_history(spelling, long_text=0, call_id_prefix=_CALL_ID_PREFIX)
        renamed = [_swap_names(message) for message in history]
        try:
            self._compare(case, glue, [*renamed, *self._history("au")], case.turn.message(), tools, told="reused ids")
        except BridgeRefusedError:
            return True
        return False

    def _history(self, spelling: str, texts: dict[str, str] | None = None) -> list[Message]:
        return build_history(spelling, long_text=length_of_long_text(self._integers), texts=texts)

    def _window_glue(self, case: _Case, tools: Sequence[ToolSchema]) -> str:
        text = self._windows.render(case.turn.message(), self._forms.conform(case.new_messages), tools=tools)
        return text[self._windows.locate(text, case.turn_sentinels).start :]

    def _compare(
        self,
        case: _Case,
        glue: str,
        history: Sequence[Message],
        turn: Message,
        tools: Sequence[ToolSchema],
        *,
        told: str,
    ) -> bool:
        """Whether the template renders this conversation; raises if it does with other glue."""
        try:
            text = self._windows.render_after(history, turn, self._forms.conform(case.new_messages), tools=tools)
        except TemplateError:
            return False
        if text[self._windows.locate(text, case.turn_sentinels).start :] != glue:
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT, f"the text after the turn is another one after {told}"
            )
        return True

    def _compare_ends(
        self,
        case: _Case,
        glue: str,
        history: Sequence[Message],
        turns: Sequence[Message],
        usual: Message,
        tools: Sequence[ToolSchema],
    ) -> None:
        """Like `_compare` for turns without the sentinels, of which the template may well cut or rewrite the text.

        `usual` is a turn with them. Whatever comes between a turn's end and the glue would hold one more end than that
        has, as the glue begins with one.
        """
        num_usual = self._num_ends(case, glue, history, usual, tools)
        if num_usual is None:
            return
        for turn in turns:
            found = self._num_ends(case, glue, history, turn, tools)
            own = self._windows.num_ends(str(turn["content"]))
            if found is not None and not 0 <= found - num_usual <= own:
                raise _other_after(turn)

    def _num_ends(
        self, case: _Case, glue: str, history: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]
    ) -> int | None:
        """How many ends of turns the conversation's text has, None if the template refuses it."""
        try:
            text = self._windows.render_after(history, turn, self._forms.conform(case.new_messages), tools=tools)
        except TemplateError:
            return None
        if not text.endswith(glue):
            raise _other_after(turn)
        return self._windows.num_ends(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A shape with sentinels for its texts."""

    turn: Turn
    new_messages: tuple[Message, ...]
    sentinels: tuple[str, ...]
    shows_text: bool = True

    @property
    def turn_sentinels(self) -> tuple[str, ...]:
        return self.turn.sentinels(shows_text=self.shows_text)

    @classmethod
    def of(cls, shape: Shape) -> _Case:
        calls = tuple((PROBE_NAMES[k % 2], f"{_CALL_ID_PREFIX}{k:05d}") for k in range(shape.num_calls))
        sentinels = tuple(f"Nq7New{k}z" for k in range(len(shape.new_messages)))
        messages = []
        for new, sentinel in zip(shape.new_messages, sentinels, strict=True):
            name, call_id = calls[new.answers] if new.answers >= 0 else (PROBE_NAMES[0], f"{_CALL_ID_PREFIX}other")
            message: Message = {"role": new.role, "content": sentinel}
            if "name" in new.keys:
                message["name"] = name
            if "tool_call_id" in new.keys:
                message["tool_call_id"] = call_id
            messages.append(message)
        turn = Turn(calls=calls, text=shape.text)
        return cls(turn=turn, new_messages=tuple(messages), sentinels=sentinels)


def _other_after(turn: Message) -> BridgeRefusedError:
    return BridgeRefusedError(
        RefusalReason.HISTORY_DEPENDENT,
        f"the text after the turn is another one if the turn says {str(turn['content'])[:40]!r} and calls "
        f"{str(turn.get('tool_calls', 'nothing'))[:200]}",
    )


def _arguments_of_turn(num_calls: int) -> Iterator[list[dict[str, Any]]]:
    """Arguments for all calls: none at all, none of the first or last one, and two each."""
    one: list[dict[str, Any]] = [{TURN_KEY: f"{TURN_ARGUMENT}{k}z"} for k in range(num_calls)]
    if num_calls:
        yield [{}] * num_calls
        yield [{**arguments, f"{TURN_KEY}2": 1} for arguments in one]
    if num_calls > 1:
        yield [{}, *one[1:]]
        yield [*one[:-1], {}]


def _texts_with(literal: str) -> tuple[str, str]:
    """The literal alone, and in the midst and at the ends of a text."""
    return literal, f"{literal} Hq7\n{literal}\nHq7 {literal}"


def _with_text(case: _Case, text: str) -> _Case:
    """The case with `text` for the text of every new message."""
    messages: list[Message] = [{**message, "content": text} for message in case.new_messages]
    return replace(case, new_messages=tuple(messages))


def _swap_names(message: Message) -> Message:
    swapped: Message = {**message}
    if "name" in message:
        swapped["name"] = _other(message["name"])
    if "tool_calls" in message:
        swapped["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _other(call["function"]["name"])}}
            for call in message["tool_calls"]
        ]
    return swapped


def _other(name: str) -> str:
    return PROBE_NAMES[1 - PROBE_NAMES.index(name)]
