"""Compares a window with random conversations, also while conditions of the template are forced.

A bridge may depend on three things at once, each of which random conversations have, but seldom together. So some
conditions of the template are forced to outcomes that they have somewhere in the panel, the others are left as they
are, and windows and conversations are compared again. A dependence on three conditions shows if two are forced right.

    condition                     window   conversations      forced in a trial
    '/fast' in the first text     false    true in some       true
    more than 9 messages          false    true in some       -
    first tool is `search`        false    true with a set    true      now the bridge changes with the messages
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.certificates.probe_window import ProbeWindow
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY, HistoryClass, iterate_texts
from unbroken.rendering.bridge.histories.random_panel import SAME_TEXT, RandomPanel
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import ShapeExample
from unbroken.rendering.bridge.window import TURN_TEXT, TextKind, WindowRenderer
from unbroken.rendering.jinja.conditions import Conditions, Outcome

_NUM_EXAMPLES = 12
"""How many other new messages are tried."""
_MAX_TRIALS = 20
_MAX_OF_TOOLS = 6
"""How many conditions on tools are tried on their own."""
_NUM_IN_TRIAL, _NUM_IN_ALL_TRIALS = 5, 120
"""How many conversations are compared in each trial, and in all if these are more."""
_THOROUGHNESS = 4
"""So many times as many, if the bridge is known to depend on the history outside this class."""
_MAX_ROUNDS = 2
"""Of trials; a forced condition may show others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A history with an example after it, and what the conditions were."""

    history: Sequence[Message]
    example: ShapeExample
    turn: Message
    """With sentinels."""
    said: Message | None = None
    """The turn with other words or arguments and without sentinels, to compare too."""
    outcomes: frozenset[Outcome] = frozenset()

    @property
    def numbers(self) -> frozenset[int]:
        """Of the conditions that were reached."""
        return frozenset(number for number, _ in self.outcomes)


class RandomCheck:
    """Compares with random conversations. `windows` render a template whose `conditions` are marked."""

    def __init__(self, windows: WindowRenderer, conditions: Conditions, *, with_reasoning: bool) -> None:
        self._windows = windows
        self._conditions = conditions
        self._with_reasoning = with_reasoning

    def check(
        self,
        example: ShapeExample,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass,
        panel: RandomPanel,
        more_histories: Iterable[Sequence[Message]],
        *,
        other_tools: Sequence[Sequence[ToolSchema]] = (),
    ) -> bool:
        """Raise `BridgeRefusedError` if the bridge depends on what is before the turn, or on what the turn says.

        With `other_tools`, also if it depends on the tools: it is compared with the first of these sets, and with the
        outcomes that conditions have with the others. Returns False if the window cannot be rendered.
        """
        maker = _WindowMaker(self._windows, tools, history_class)
        self._conditions.take_outcomes()
        usual_window = maker.make(example)
        if usual_window is None:
            return False
        usual = self._conditions.take_outcomes()
        compared = list(self._compare(maker, self._draw(example, panel, more_histories)))
        seen = usual.union(*(conversation.outcomes for conversation in compared))
        with_tools = self._record_tools(example, other_tools, history_class)
        if other_tools:
            maker.others = _WindowMaker(self._windows, other_tools[0], history_class)
            self._compare_tools(with_tools - usual, maker)
        seen |= with_tools
        for _ in range(_MAX_ROUNDS):
            forced = self._try_all(_find_rare(seen, usual), usual, compared, maker)
            if forced is None:
                break
            compared = self._try(forced, compared[::2], maker)
            seen |= self._record_tools(example, other_tools, history_class, forced)
            seen |= frozenset[Outcome]().union(*(conversation.outcomes for conversation in compared))
        return True

    def _record_tools(
        self,
        example: ShapeExample,
        tool_sets: Sequence[Sequence[ToolSchema]],
        history_class: HistoryClass,
        forced: Mapping[int, bool] | None = None,
    ) -> frozenset[Outcome]:
        """The outcomes in windows with each set of tools."""
        self._conditions.take_outcomes()
        self._conditions.forced = forced or {}
        for tools in tool_sets:
            _WindowMaker(self._windows, tools, history_class).make(example)
        self._conditions.forced = {}
        return self._conditions.take_outcomes()

    def _try_all(
        self,
        numbers: Sequence[int],
        usual: frozenset[Outcome],
        conversations: Sequence[_Conversation],
        maker: _WindowMaker,
    ) -> dict[int, bool] | None:
        """Force these conditions in many ways. Returns the way that reaches most others, if one reaches any."""
        trials = list(_draw_trials(numbers))
        num_in_trial = max(_NUM_IN_TRIAL, _NUM_IN_ALL_TRIALS // max(len(trials), 1))
        num_in_trial *= 1 if maker.history_class == ANY_HISTORY else _THOROUGHNESS
        shown = {(number, value) for number in numbers for value in (True, False)} - usual
        chosen = _choose(conversations, shown, num_in_trial)
        num_known = sum(len(conversation.numbers) for conversation in chosen)
        most: tuple[int, dict[int, bool] | None] = (0, None)
        for forced in trials:
            num_reached = sum(len(conversation.numbers) for conversation in self._try(forced, chosen, maker))
            most = max(most, (num_reached - num_known, forced), key=lambda entry: entry[0])
        return most[1]

    def _draw(
        self, example: ShapeExample, panel: RandomPanel, more_histories: Iterable[Sequence[Message]]
    ) -> Iterator[_Conversation]:
        """The example after each history, and the same with other new messages after some of them, each."""
        drawn = panel.draw_new_messages(example.new_messages, _NUM_EXAMPLES)
        others = [replace(example, new_messages=messages) for messages in drawn]
        others += map(example.with_text, panel.list_texts() if panel.reads_new_texts else ())
        has_words = example.turn.text is TextKind.WORDS
        same = example.with_text(SAME_TEXT if has_words else str(example.turn.build_message()["content"]))
        rng = random.Random(0)
        for number, history in enumerate(panel.draw_histories()):
            turn = example.turn.build_message(with_reasoning=self._with_reasoning and number % 2 == 0)
            yield _Conversation(history=history, example=example, turn=turn)
            if number % 2 or panel.reads_new_texts:
                yield _Conversation(history=history, example=others[number % len(others)], turn=turn)
            if number % (2 if panel.items else 4) == 0:
                said = _say_otherwise(turn, panel, rng)
                yield _Conversation(history=history, example=example, turn=turn, said=said)
            if panel.reads_equality and number % 3 == 0:
                same_said: Message | None = {**turn, "content": SAME_TEXT} if has_words else None
                yield _Conversation(history=_say_same(history, rng), example=same, turn=turn, said=same_said)
        turn = example.turn.build_message()
        yield from (_Conversation(history=history, example=example, turn=turn) for history in more_histories)

    def _compare(self, maker: _WindowMaker, conversations: Iterable[_Conversation]) -> Iterator[_Conversation]:
        """Those that the template accepts, with their outcomes added."""
        for conversation in conversations:
            window = maker.make(conversation.example)
            self._conditions.take_outcomes()
            history, turn = conversation.history, conversation.turn
            if window is None or not window.check_conversation(history, turn, description=_describe(history)):
                continue
            said = conversation.said
            # An end that a turn spells itself cannot be distinguished from one that the template writes.
            if said is not None and not any(map(self._windows.count_turn_ends, iterate_texts(said))):
                window.check_turns(history, [said], window.count_turn_ends(history, turn))
            yield replace(conversation, outcomes=conversation.outcomes | self._conditions.take_outcomes())

    def _compare_tools(self, of_tools: frozenset[Outcome], maker: _WindowMaker) -> None:
        """Compare the windows of all examples with what they are with other tools."""
        maker.check_same_with_others()
        trials = [dict([outcome]) for outcome in sorted(of_tools)[:_MAX_OF_TOOLS]]
        for forced in (*trials, dict(of_tools)) if len(trials) > 1 else trials:
            self._conditions.forced = forced
            try:
                maker.check_same_as(maker.copy())
            finally:
                self._conditions.forced = {}

    def _try(
        self, forced: Mapping[int, bool], conversations: Sequence[_Conversation], maker: _WindowMaker
    ) -> list[_Conversation]:
        """Compare while conditions are forced. Returns the conversations with the outcomes that they add."""
        self._conditions.forced = forced
        try:
            anew = maker.copy()
            compared = list(self._compare(anew, conversations))
            anew.check_same_with_others(max_windows=1)
            return compared
        except BridgeRefusedError as error:
            if error.refusal.reason is RefusalReason.HISTORY_DEPENDENT:
                raise
            return []  # the turn is not where it should be: the template never does this
        finally:
            self._conditions.forced = {}


class _WindowMaker:
    """Makes the window of each example once. `others` makes them with other tools."""

    def __init__(
        self,
        windows: WindowRenderer,
        tools: Sequence[ToolSchema],
        history_class: HistoryClass,
        others: _WindowMaker | None = None,
    ) -> None:
        self._windows = windows
        self._tools = tools
        self.history_class = history_class
        self._made: dict[int, tuple[ShapeExample, ProbeWindow | None]] = {}
        self.others = others

    def copy(self) -> _WindowMaker:
        """One that makes all windows anew."""
        others = None if self.others is None else self.others.copy()
        return _WindowMaker(self._windows, self._tools, self.history_class, others)

    def make(self, example: ShapeExample) -> ProbeWindow | None:
        """The window; None if real messages like these are refused, too."""
        if id(example) not in self._made:
            try:
                window = ProbeWindow(self._windows, example, tools=self._tools, history_class=self.history_class)
            except BridgeRefusedError:
                window = None
            self._made[id(example)] = (example, window)
        return self._made[id(example)][1]

    def check_same_with_others(self, max_windows: int | None = None) -> None:
        """Raise `BridgeRefusedError` if the first windows so far are different ones with the other tools."""
        if self.others is not None:
            self.check_same_as(self.others, max_windows)

    def check_same_as(self, other: _WindowMaker, max_windows: int | None = None) -> None:
        """Raise `BridgeRefusedError` if the first windows so far end in another text as another maker makes them."""
        for example, window in tuple(self._made.values())[:max_windows]:
            changed = other.make(example)
            if window is not None and changed is not None and changed.bridge_text != window.bridge_text:
                raise BridgeRefusedError(
                    RefusalReason.HISTORY_DEPENDENT, "the text after the turn changes with the tools"
                )


def _say_same(history: Sequence[Message], rng: random.Random) -> list[Message]:
    """The history with the same text in its first or last message, too."""
    place = rng.choice((0, len(history) - 1))
    return [{**message, "content": SAME_TEXT} if k == place else message for k, message in enumerate(history)]


def _say_otherwise(turn: Message, panel: RandomPanel, rng: random.Random) -> Message:
    """The turn with other words, if it has any, and with other arguments."""
    said: Message = {**turn}
    if str(turn["content"]).strip():
        text = panel.draw_text(rng, 0.2)
        said["content"] = rng.choice((text, f"{text}{TURN_TEXT}{text}")) if text.strip() else TURN_TEXT
    if "tool_calls" in turn:
        said["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": panel.draw_arguments(rng)}}
            for call in turn["tool_calls"]
        ]
    return said


def _find_rare(seen: frozenset[Outcome], usual: frozenset[Outcome]) -> list[int]:
    """The conditions that have both outcomes, but not both in the window."""
    numbers = sorted({number for number, _ in seen})
    return [n for n in numbers if {(n, True), (n, False)} <= seen and not {(n, True), (n, False)} <= usual]


def _choose(conversations: Sequence[_Conversation], shown: set[Outcome], num: int) -> list[_Conversation]:
    """Some conversations, in which as many as possible of the outcomes are `shown`."""
    chosen: list[_Conversation] = []
    while shown and len(chosen) < num:
        best = max(conversations, key=lambda each: len(shown & each.outcomes), default=None)
        if best is None or not shown & best.outcomes:
            break
        chosen.append(best)
        shown = shown - best.outcomes
    num_more = num - len(chosen)
    return chosen + list(conversations[1 :: len(conversations) // num_more + 1])[:num_more] if num_more else chosen


def _draw_trials(numbers: Sequence[int]) -> Iterator[dict[int, bool]]:
    """Outcomes to force for one or two of the conditions. More at once are seldom an outcome of any messages."""
    rng = random.Random(0)
    seen: set[tuple[tuple[int, bool], ...]] = set()
    for _ in range(20 * _MAX_TRIALS if numbers else 0):
        if len(seen) >= _MAX_TRIALS:
            return
        chosen = sorted(rng.sample(numbers, min(rng.choice((1, 2, 2)), len(numbers))))
        forced = {number: rng.random() < 0.5 for number in chosen}
        key = tuple(forced.items())
        if key not in seen:
            seen.add(key)
            yield forced


def _describe(history: Sequence[Message]) -> str:
    return f"a history of the roles {', '.join(message['role'] for message in history[:12])}"
