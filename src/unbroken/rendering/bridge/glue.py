r"""Finds the glue between a sampled turn and the next generation prompt, by rendering the conversation itself.

The glue is what the template writes after the turn: the end of the turn, the new messages, the generation prompt. With
H the messages before the turn, A the turn and M the new messages, two texts are rendered:

    H + S + M   ..assistant\nIt isWq7Text<|im_end|>\n<|im_start|>tool\n(0)42(/)<|im_end|>\n<|im_start|>assistant\n
                                        `-------------------------- the glue -----------------------------´
    H + A + M   ..assistant\nIt is<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n

S is the turn with a sentinel at the end of each of its texts, because A may say anything, ends of turns included: after
the sentinels, the first token that ends a turn is the end of this one. The texts of M have marks around them
(`encoding.marks`), which show where text from outside is. The glue of the first text, without its marks, is right if
all of this holds:

- the second text, which is the real conversation, ends with it;
- between the sentinels and it there is only white space, or what closes calls also where nothing follows the turn;
- before it, the second text has as many ends of turns as the first, or more by at most those that A spells, and after
  the last of them it begins with the same word;
- each text of M stands in it once, and they stand in order, or results of one turn in that of its calls;
- no control token in it is one that a message of H spells.

Otherwise there is a refusal that says what differed. A template that does something to marked text (it cuts it, or
compares it) is asked twice more: M as it is, for the glue, and M with sentinels as texts, to see that each stands once.

A sentinel changes what some templates write: a call without arguments gets one, reasoning alone gets an answer. Then S
is tried that is *bare*: its sentinels stand at the ends of reasoning and of the names of such calls. This kind of turn
was not probed for its end (`TurnEnds.endings`): it must end like that where nothing follows it.

Of a long conversation the second text is compared with the one of a few of its messages, the first ones and those since
the turn before: if both are the same after the prompt that was sampled from, the glue of the short conversation, found
in the same way, is that of the long one too, and no second long text is rendered.

The second text also says whether a fresh rendering would have kept the prompt and the turn (P2): see `history_effect`.
If it rewrites them, messages before the turn may have moved behind it: that is checked with sentinels in their texts.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message, ToolSchema, iterate_strings
from unbroken.rendering.base import HistoryEffect, RefusalReason
from unbroken.rendering.bridge.history_effect import HistoryEffects
from unbroken.rendering.bridge.sentinels import (
    SentinelTexts,
    TurnSentinels,
    build_sentinel_turn,
    may_change_shape,
    stand_once,
)
from unbroken.rendering.bridge.turn_ends import BridgeRefusedError, TurnEnds
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.marks import (
    OUTSIDE_INDEX,
    Marks,
    Span,
    find_outside_strings,
)
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.message_format import MessageFormat, get_texts, says_something
from unbroken.rendering.prompt import KnownPrompt, RecentPrompts
from unbroken.threads import RendererLock

_NUM_SHOWN = 60
"""How many characters of a text an explanation shows."""
_MIN_RATIO = 6
"""Two renderings of a short conversation stand for one of the whole: then they cost a third of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glue:
    """The text from the end of a turn to the end of the next generation prompt."""

    text: str
    end_token: str
    """The control token that it begins with, which ends the turn."""
    ending: str = ""
    """The text up to the stop, if the turn is of a kind that was not probed (`TurnEnds.endings`); else empty."""
    spans: Sequence[Span]
    """The text from outside in it."""
    history: HistoryEffect | None
    """The effect of a fresh rendering on everything before it; None if the template refuses to render that alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A conversation in the template's message format, and the turn once more with a sentinel in each text."""

    before: list[dict[str, Any]]
    turn: dict[str, Any]
    new: list[dict[str, Any]]
    tools: Sequence[ToolSchema]
    sentinel_turn: dict[str, Any]
    sentinels: TurnSentinels
    marks: Marks
    """Of characters that the real conversation does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A rendered text, cut at the end of the turn: `before` + `glue`."""

    before: str
    closing: str
    """The end of `before`, after the turn's last text: what closes its calls."""
    glue: str
    end_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The glue of a conversation."""

    conversation: _Conversation
    cut: _Cut
    spans: Sequence[Span]
    ending: str
    """As in `Glue`."""


class GlueFinder:
    """Finds the glue for one template. Any number of threads may use it."""

    def __init__(
        self,
        template: ChatTemplate,
        message_format: MessageFormat,
        ends: TurnEnds,
        encoder: SafeEncoder,
        lock: RendererLock,
        *,
        reasoning_markup: tuple[str, str],
        prompts: RecentPrompts,
        repeats_system: bool = False,
    ) -> None:
        """Find glue of `template`; with `repeats_system` a system text before the turn may stand in it again."""
        self._template = template
        self._format = message_format
        self._encoder = encoder
        self._lock = lock
        self._ends = ends
        self._end_tokens = sorted(ends.tokens, key=len, reverse=True)
        self._end_pattern = re.compile("|".join(map(re.escape, self._end_tokens)))
        self._prompts = prompts
        self._may_move = frozenset({"system", "developer"}) if repeats_system else frozenset()
        self._effects = HistoryEffects(self._render, self._end_pattern, reasoning_markup)

    def find(
        self,
        assistant: Message,
        new_messages: Sequence[Message],
        *,
        earlier: Sequence[Message],
        tools: Sequence[ToolSchema],
        sampled_text: Callable[[], str],
    ) -> Glue:
        """Find the glue after the turn `assistant`, sampled as `sampled_text`; `earlier` are the messages before it.

        Raises:
            BridgeRefusedError: the template refuses the conversation, or one of the conditions does not hold.
        """
        try:
            new = self._format.convert(new_messages)
        except MessagesError as error:
            raise BridgeRefusedError(RefusalReason.UNSUPPORTED, f"new {error}") from None
        known = self._prompts.find(earlier, tools)
        before = self._format.convert(earlier) if known is None else known.messages
        [turn] = self._format.convert([assistant])
        messages = [*before, turn, *new]
        try:
            real = self._render(messages, tools=tools)
            found = self._find_in_short(before, turn, new, tools, real, known) or self._find_in(
                before, turn, new, tools, real
            )
            cut = found.cut
            conversation = replace(found.conversation, before=before)
            absent = self._check_nothing_forged(conversation, cut.glue, known)
            history = self._effects.find(
                messages,
                len(before),
                real.removesuffix(cut.glue),
                prompt=None if known is None else known.text,
                tools=tools,
                glue=cut.glue,
                writes_calls=conversation.sentinels.stand_for_calls(turn, cut.before),
                sampled_text=sampled_text,
            )
            # Of the effects only these may write messages before the turn again, after it.
            if history is HistoryEffect.REWRITTEN or history is None:
                self._check_nothing_moved(conversation, real, cut.glue)
        except TemplateError as error:
            raise BridgeRefusedError(RefusalReason.TEMPLATE_RAISES, str(error)) from None
        self._prompts.add(
            [*earlier, assistant, *new_messages], tools, real, converted=messages, known=known, absent=absent
        )
        return Glue(text=cut.glue, end_token=cut.end_token, ending=found.ending, spans=found.spans, history=history)

    def _render(
        self, messages: list[dict[str, Any]], *, tools: Sequence[ToolSchema], add_generation_prompt: bool = True
    ) -> str:
        with self._lock:
            return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def _find_in_short(
        self,
        before: list[dict[str, Any]],
        turn: dict[str, Any],
        new: list[dict[str, Any]],
        tools: Sequence[ToolSchema],
        real: str,
        known: KnownPrompt | None,
    ) -> _Found | None:
        """What `_find_in` finds in a short conversation whose text ends as the real one does after its prompt.

        None if there is no such conversation: then nothing less than the real one shows where its glue begins.
        """
        short = _leave_out_middle(before)
        if known is None or short is None:
            return None
        prompt = self._effects.cut_opening(known.text, real)
        if prompt is None:
            return None
        after_prompt = real[len(prompt) :]
        with suppress(BridgeRefusedError, TemplateError):
            text = self._render([*short, turn, *new], tools=tools)
            if text.endswith(after_prompt):
                found = self._find_in(short, turn, new, tools, text)
                return found if len(found.cut.glue) <= len(after_prompt) else None
        return None

    def _find_in(
        self,
        before: list[dict[str, Any]],
        turn: dict[str, Any],
        new: list[dict[str, Any]],
        tools: Sequence[ToolSchema],
        real: str,
    ) -> _Found:
        """The glue in the text `real` of a conversation, found with sentinels that keep the shape of its turn."""
        word, marks = _choose_word("W", real), Marks.absent_from(real, new)
        calls: Sequence[Mapping[str, Any]] = (turn.get("tool_calls") or ()) if self._format.renders_calls else ()
        first_error: Exception | None = None
        # Sentinels made turns of another shape, and refused without cause: a call without arguments got one.
        for is_bare in (False, True) if may_change_shape(turn, calls) else (False,):
            sentinel_turn, sentinels = build_sentinel_turn(turn, word, calls=calls, is_bare=is_bare)
            conversation = _Conversation(
                before=before,
                turn=turn,
                new=new,
                tools=tools,
                sentinel_turn=sentinel_turn,
                sentinels=sentinels,
                marks=marks,
            )
            try:
                cut, spans = self._cut_marked(conversation, real) or self._cut_unmarked(conversation, real)
                ending = self._check_closing(conversation, cut)
                return _Found(conversation=conversation, cut=cut, spans=spans, ending=ending)
            except (BridgeRefusedError, TemplateError) as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _cut_marked(self, conversation: _Conversation, real: str) -> tuple[_Cut, list[Span]] | None:
        """The glue and its spans, from a rendering with marks; None if they do not show that it is right."""
        if (read := self._read_marked(conversation)) is None:
            return None
        turn, cut, spans = read
        if self._explain_difference(conversation, real, cut.before, cut.glue) is not None:
            return None
        shown = [span.index for span in spans if span.index != OUTSIDE_INDEX]
        expected = [index for index, message in enumerate(conversation.new) for _ in _list_words([message])]
        if not stand_once(shown, expected, conversation.new):
            return None
        if self._cuts_texts(conversation, cut.glue, spans):
            return None
        if len(shown) < len(_list_texts(conversation.new)):  # a blank text has no mark
            self._check_each_stands_once(conversation, turn, real, cut.glue)
        return cut, spans

    def _cuts_texts(self, conversation: _Conversation, glue: str, spans: Sequence[Span]) -> bool:
        """Whether the template cuts new messages at control tokens that they spell, and may write its own there."""
        if not any(self._encoder.has_control(glue[span.start : span.stop]) for span in spans):
            return False
        marks = replace(conversation.marks, split=self._encoder.split_control)
        read = self._read_marked(replace(conversation, marks=marks))
        return read is None or read[1].glue != glue

    def _read_marked(self, conversation: _Conversation) -> tuple[dict[str, Any], _Cut, list[Span]] | None:
        """The marked turn, the rendering with marks, cut, and the spans of its glue; None if they cannot be read."""
        may_forge, marks = self._encoder.may_forge, conversation.marks
        turn, new = self._mark_calls(conversation), marks.mark_messages(conversation.new, may_forge)
        try:
            marked = self._render(
                [*conversation.before, turn, *new], tools=marks.mark_suspicious_strings(conversation.tools, may_forge)
            )
            cut = self._cut(marked, conversation)
        except (TemplateError, BridgeRefusedError):
            return None
        read = marks.remove(cut.glue)
        return None if read is None else (turn, replace(cut, glue=read[0]), read[1])

    def _mark_calls(self, conversation: _Conversation) -> dict[str, Any]:
        """The turn with marks around the names and ids of calls that may forge: headers of results may quote them."""
        turn = conversation.sentinel_turn
        calls = turn.get("tool_calls")
        if not calls:
            return turn
        named = conversation.marks.mark_suspicious_strings(_remove_arguments(calls), self._encoder.may_forge)
        return {**turn, "tool_calls": [_add_arguments(*pair) for pair in zip(named, calls, strict=True)]}

    def _cut_unmarked(self, conversation: _Conversation, real: str) -> tuple[_Cut, list[Span]]:
        """The glue from a rendering of the new messages as they are. No text in it may forge a control token."""
        turn = conversation.sentinel_turn
        text = self._render([*conversation.before, turn, *conversation.new], tools=conversation.tools)
        cut = self._cut(text, conversation)
        difference = self._explain_difference(conversation, real, cut.before, cut.glue)
        if difference is not None:
            raise BridgeRefusedError(RefusalReason.HISTORY_DEPENDENT, difference)
        outside = [{"tool_calls": _remove_arguments(turn.get("tool_calls") or ())}, *conversation.new]
        if any(map(self._encoder.may_forge, find_outside_strings(outside, conversation.tools))):
            raise BridgeRefusedError(
                RefusalReason.UNSAFE_TEXT, "the template rewrites text that has a control token in it"
            )
        self._check_each_stands_once(conversation, turn, real, cut.glue)
        return cut, []

    def _cut(self, text: str, conversation: _Conversation) -> _Cut:
        """Cut a text at the first token that ends a turn after the sentinels.

        Some templates leave out the text of a turn that has calls; its last call must be there.
        """
        sentinels = conversation.sentinels
        # Each search reads the whole conversation: one for each sentinel.
        starts = {each: text.find(each) for each in sentinels.of_end}
        if starts[sentinels.of_end[0]] < 0:
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, "the template leaves out the turn or its last call")
        text_stop = max(start + len(each) for each, start in starts.items() if start >= 0)
        match = self._end_pattern.search(text, text_stop)
        if match is None:
            raise BridgeRefusedError(RefusalReason.UNDERIVABLE, "no control token ends the assistant turn")
        before, glue = text[: match.start()], sentinels.remove_names(text[match.start() :])
        if sentinels.word in glue:
            raise BridgeRefusedError(RefusalReason.REORDERS_TURN, "text of the turn stands after the end of the turn")
        closing = conversation.marks.remove(text[text_stop : match.start()])
        if closing is None:
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, "a call's name or id spells the end of the turn")
        return _Cut(before=before, closing=closing[0].strip(), glue=glue, end_token=match.group())

    def _check_closing(self, conversation: _Conversation, cut: _Cut) -> str:
        """Check that no text of what follows stands before the token that ends the turn: it would be lost.

        Text is the turn's own if it closes calls, and the template writes it with nothing after them, too. Of a bare
        turn, whose kind was not probed, that must hold for the whole end, which is returned.
        """
        is_bare = conversation.sentinels.is_bare
        ending = self._find_whole_end(cut.glue) if is_bare and not self._ends.headers else ""
        if not is_bare and not cut.closing:
            return ""
        if is_bare or conversation.turn.get("tool_calls"):
            # A turn that has no end stops where the text does: the header of the next message ends it.
            is_all = r"\s*\Z" if is_bare and not ending else ""
            pattern = re.compile(rf"\s*{re.escape(cut.closing)}\s*{re.escape(ending)}{is_all}")
            if any(map(pattern.match, self._render_ends(conversation))):
                return ending
        # Bridges lost it: of the header `user: see <img>` only what follows `<img>` was left.
        raise BridgeRefusedError(
            RefusalReason.UNDERIVABLE,
            f"{cut.closing[:_NUM_SHOWN]!r} stands between the turn and {cut.end_token!r}, which should end it",
        )

    def _find_whole_end(self, glue: str) -> str:
        """The beginning of the glue up to the stop; all of it if there is no stop."""
        matches = self._end_pattern.finditer(glue)
        stop = next((match for match in matches if match.group() in self._ends.stops), None)
        return glue if stop is None else glue[: stop.end()]

    def _render_ends(self, conversation: _Conversation) -> Iterator[str]:
        """The text after the turn's last sentinel, where it ends a short conversation, and where it ends this one."""
        user = self._format.convert([{"role": "user", "content": f"{conversation.sentinels.word}User"}])
        for before in (user, conversation.before):
            with suppress(TemplateError):  # a template may refuse to begin so, or to end so
                messages = [*before, conversation.sentinel_turn]
                text = self._render(messages, tools=conversation.tools, add_generation_prompt=False)
                _, last, end = text.rpartition(max(conversation.sentinels.of_end, key=text.rfind))
                if last:
                    yield end

    def _explain_difference(self, conversation: _Conversation, real: str, before: str, glue: str) -> str | None:
        """How the rendering of the real turn differs from the one with sentinels in its place; None if it does not."""
        if not real.endswith(glue):
            same = _count_common_suffix(real, glue)
            where = len(glue) - same
            return (
                "the text after the turn depends on what the turn says: "
                f"..{real[: len(real) - same][-_NUM_SHOWN:]!r} instead of ..{glue[:where][-_NUM_SHOWN:]!r}, "
                f"before {glue[where:][:_NUM_SHOWN]!r}"
            )
        real_before = real[: len(real) - len(glue)]
        num_more = self._count_ends(real_before) - self._count_ends(before)
        num_own = sum(map(self._count_ends, iterate_strings(conversation.turn)))
        own = [
            conversation.sentinels.word,
            *(call["function"]["name"] for call in conversation.turn.get("tool_calls") or ()),
        ]
        # A template that moves an earlier message behind the turn keeps the glue, but has another message before it.
        # A turn that spells ends, or says nothing, has no beginning to compare.
        may_differ = num_own > 0 or not says_something(conversation.turn)
        if num_more == 0 and not may_differ and not self._begins_like(real_before, before, own, conversation.marks):
            return f"another message is before it: ..{real_before[-_NUM_SHOWN:]!r}, not ..{before[-_NUM_SHOWN:]!r}"
        if 0 <= num_more <= num_own:
            return None
        return (
            f"there are {num_more:+d} ends of turns before the new messages compared with sentinels in the turn, which "
            f"itself spells {num_own}: it reads ..{real_before[-_NUM_SHOWN:]!r}, not ..{before[-_NUM_SHOWN:]!r}"
        )

    def _begins_like(self, real_before: str, before: str, own: Sequence[str], marks: Marks) -> bool:
        """Whether the text after the last end of a turn begins with the same word, before the turn's `own` words."""
        last, real_last = (
            marks.strip(text[max((text.rfind(end) + len(end) for end in self._end_tokens if end in text), default=0) :])
            for text in (before, real_before)
        )
        header = last[: min(last.find(each) for each in own if each in last)].split(maxsplit=1)
        return not header or real_last.lstrip().startswith(header[0])

    def _count_ends(self, text: str) -> int:
        return sum(map(text.count, self._end_tokens))

    def _check_each_stands_once(self, conversation: _Conversation, turn: dict[str, Any], real: str, glue: str) -> None:
        """Check with sentinels that each text of the new messages stands in the glue once, in order.

        The template may treat sentinels otherwise than the texts: all that it writes around them is in `glue` too.
        Where it is not, because a text says `/no_think`, the sentinels stand at the ends of the texts.
        """
        word = _choose_word("X", real)
        try:
            self._check_sentinels(conversation, turn, glue, word, keeps_texts=False)
        except BridgeRefusedError as error:
            try:
                self._check_sentinels(conversation, turn, glue, word, keeps_texts=True)
            except (BridgeRefusedError, TemplateError):
                raise error from None

    def _check_sentinels(
        self, conversation: _Conversation, turn: dict[str, Any], glue: str, word: str, *, keeps_texts: bool
    ) -> None:
        probes = SentinelTexts(conversation.new, word, keeps_texts=keeps_texts)
        text = self._render([*conversation.before, turn, *probes.messages], tools=conversation.tools)
        around, numbers = probes.split(self._cut(text, conversation).glue)
        if not probes.stand_once(numbers):
            raise BridgeRefusedError(
                RefusalReason.DROPS_MESSAGE,
                "the template drops, repeats or reorders new messages: of their texts 0 to "
                f"{len(probes.names) - 1} it writes {numbers} after the turn",
            )
        # Texts that stay may have control tokens between the pieces; those that are replaced have theirs
        # in the glue only.
        has_same_control = keeps_texts or self._count_control([*around, *_list_texts(conversation.new)]) == (
            self._count_control([glue])
        )
        if not has_same_control or not probes.fit_into(around, glue):
            raise BridgeRefusedError(
                RefusalReason.HISTORY_DEPENDENT,
                "the text around the new messages depends on what they say: "
                f"{glue[:_NUM_SHOWN]!r}.. instead of {'..'.join(around)[:_NUM_SHOWN]!r}..",
            )

    def _count_control(self, texts: Sequence[str]) -> int:
        return sum(1 for text in texts for _ in self._encoder.control.find(text))

    def _check_nothing_forged(
        self, conversation: _Conversation, glue: str, known: KnownPrompt | None
    ) -> frozenset[str]:
        """Check that no control token of the glue is one that a message before the turn spells.

        A template that quotes such a message writes it without a mark. Another spelling must not change the glue.
        Returns tokens that no text spells, which for the messages before the turn need not be looked for again.
        """
        tokens = frozenset(match.token for match in self._encoder.control.find(glue))
        absent = frozenset() if known is None else known.absent
        spelled = _find_spelled(tokens - absent, conversation.before)
        if spelled:
            self._check_spelling(conversation, glue, spelled)
        absent |= tokens - spelled
        return absent - _find_spelled(absent, [conversation.turn, *conversation.new])

    def _check_spelling(self, conversation: _Conversation, glue: str, spelled: frozenset[str]) -> None:
        """Check that the glue stays the same where the messages before the turn spell none of these tokens."""
        word = _choose_word("X", glue)
        pattern = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))))
        before = [_replace_pattern(message, pattern, word) for message in conversation.before]
        messages = [*before, conversation.sentinel_turn, *conversation.new]
        if self._cut(self._render(messages, tools=conversation.tools), conversation).glue != glue:
            raise BridgeRefusedError(
                RefusalReason.UNSAFE_TEXT,
                f"a message before the turn has {min(spelled)!r} in it, and the text after the turn depends on that",
            )

    def _check_nothing_moved(self, conversation: _Conversation, real: str, real_glue: str) -> None:
        """Check that no message before the turn stands after it, but for those that may be repeated.

        Sentinels as their texts show that, and sentinels at the ends of their texts, where a template moves a message
        because of what it says. Where both change the glue, the texts themselves are looked for in it.
        """
        word = _choose_word("X", real)
        fixed = [message for message in conversation.before if message["role"] not in self._may_move]
        for keeps_texts in (False, True):
            probes = SentinelTexts(fixed, word, keeps_texts=keeps_texts)
            rest = iter(probes.messages)
            before = [each if each["role"] in self._may_move else next(rest) for each in conversation.before]
            text = self._render([*before, conversation.sentinel_turn, *conversation.new], tools=conversation.tools)
            glue = self._cut(text, conversation).glue
            if any(name in glue for name in probes.names):
                raise _moved_error()
            if glue == real_glue:
                return
        rest_of_glue = functools.reduce(
            lambda text, new: text.replace(new, ""), _list_words(conversation.new), real_glue
        )
        if _has_any_as_words(rest_of_glue, _list_words(fixed)):
            raise _moved_error()


def _has_any_as_words(text: str, phrases: Sequence[str]) -> bool:
    """Whether one of the phrases stands in a text as whole words: the phrase "a" stands in nearly each glue."""
    return any(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) for phrase in phrases)


def _moved_error() -> BridgeRefusedError:
    return BridgeRefusedError(
        RefusalReason.DROPS_MESSAGE, "the template writes a message before the turn again, or after it"
    )


def _leave_out_middle(before: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages up to the first of a user, and from the last turn on; None if these are not much fewer."""
    first = next((k for k, message in enumerate(before) if message["role"] == "user"), len(before))
    turn = next((k for k in reversed(range(len(before))) if before[k]["role"] == "assistant"), 0)
    num_left = first + 1 + len(before) - turn
    return [*before[: first + 1], *before[turn:]] if first < turn and num_left * _MIN_RATIO <= len(before) else None


def _list_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [text for message in messages for text in get_texts(message)]


def _list_words(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of messages without white space around them, if there is more to them."""
    return [words for text in _list_texts(messages) if (words := text.strip())]


def _find_spelled(tokens: frozenset[str], messages: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Those of the tokens that stand in a string of the messages other than their roles."""
    if not tokens:
        return tokens
    texts = "\n".join(
        iterate_strings([value for message in messages for key, value in message.items() if key != "role"])
    )
    return frozenset(token for token in tokens if token in texts)


def _replace_pattern(message: Mapping[str, Any], pattern: re.Pattern[str], word: str) -> dict[str, Any]:
    """The message with `word` for each match in its strings. Its role stays, and so do keys."""

    def replace_in(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(word, value)
        if isinstance(value, Mapping):
            return {key: replace_in(item) for key, item in value.items()}
        return [replace_in(item) for item in value] if isinstance(value, list) else value

    return {key: value if key == "role" else replace_in(value) for key, value in message.items()}


def _add_arguments(named: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    return {**named, "function": {**named["function"], "arguments": call["function"]["arguments"]}}


def _remove_arguments(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls without their arguments, which stand before the end of the turn."""
    return [{**call, "function": {**call["function"], "arguments": None}} for call in calls]


def _count_common_suffix(left: str, right: str) -> int:
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _choose_word(letter: str, text: str) -> str:
    """The beginning of sentinels, which `text` does not contain."""
    return next(word for number in itertools.count(7) if (word := f"{letter}q{number}") not in text)
