"""Sentinels: texts that no message has, which show in a rendering where a turn ends and where each new text stands.

The turn gets one at the end of each of its texts, because it may say anything, ends of turns included. Other messages
get one as each of their texts, or at the end of it (`SentinelTexts`): that shows which of them a template writes, how
often, and in which order.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.messages import REASONING_KEYS, get_reasoning
from unbroken.rendering.message_format import get_texts, parse_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSentinels:
    """The sentinels of one turn: they all begin with `word`."""

    word: str
    of_end: tuple[str, ...]
    """The turn ends after the last of them: those of its last call, and that of its content."""
    of_calls: tuple[str, ...]
    """One of each call that the template may write."""
    is_bare: bool = False
    """Nothing was added to the turn but what stands at the end of a name or of reasoning."""

    def stand_for_calls(self, turn: Mapping[str, Any], text: str) -> bool:
        """Whether those of all calls of the turn are in a text."""
        return sum(each in text for each in self.of_calls) == len(turn.get("tool_calls") or ())

    def remove_names(self, glue: str) -> str:
        """The glue without the sentinels of names, which the headers of results may quote."""
        return re.sub(rf"{self.word}Name\d+z", "", glue) if self.is_bare else glue


def may_change_shape(turn: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether sentinels may make a template write a turn of another shape; `calls` are those that it writes.

    They may if the turn says only reasoning, or makes a call without arguments.
    """
    if calls:
        return not all(map(_read_arguments, calls))
    return bool(get_reasoning(turn)) and not _has_words(turn)


def build_sentinel_turn(
    real_turn: Mapping[str, Any], word: str, *, calls: Sequence[Mapping[str, Any]], is_bare: bool = False
) -> tuple[dict[str, Any], TurnSentinels]:
    """The turn with a sentinel at the end of each text; `calls` are those of its calls that the template writes.

    Content without words gets one only if there are no calls, to mark the end of the turn, and a call without
    arguments gets one. Names and ids of calls stay, because some templates write them into the headers of results.

    A template may write a turn of another shape then. If it `is_bare`, neither content nor arguments are added: its
    end is marked at the end of its reasoning, or of a call's name.
    """
    turn = {**real_turn}
    for key in REASONING_KEYS:
        if isinstance(turn.get(key), str):
            turn[key] += f"{word}Reasoning"
    of_end: list[str] = []
    of_calls: list[str] = []
    if calls:
        turn["tool_calls"] = []
        for number, call in enumerate(calls):
            changed, of_end = _mark_call(call, word, number, is_bare=is_bare)
            turn["tool_calls"].append(changed)
            of_calls.append(of_end[0])
    if _has_words(turn) or not (calls or is_bare):
        turn["content"] = _add_to_content(turn["content"], f"{word}Text")
        of_end = [*of_end, f"{word}Text"]
    return turn, TurnSentinels(
        word=word, of_end=tuple(of_end or [f"{word}Reasoning"]), of_calls=tuple(of_calls), is_bare=is_bare
    )


class SentinelTexts:
    """Messages with a sentinel as each text of their contents, or at the end of it (`keeps_texts`)."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], word: str, *, keeps_texts: bool) -> None:
        self._originals = messages
        self._keeps_texts = keeps_texts
        self._pattern = re.compile(rf"({word}New\d+z)")
        self.names: list[str] = []
        """The sentinels, in the order of the texts."""
        self.messages = [self._mark(message, word) for message in messages]

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The pieces of a text between the sentinels, and the numbers of the sentinels in it."""
        pieces = self._pattern.split(text)
        return pieces[::2], [self.names.index(name) for name in pieces[1::2]]

    def stand_once(self, numbers: Sequence[int]) -> bool:
        """Whether the sentinels with these numbers, as a template writes them, are each of them once and in order."""
        owners = [index for index, message in enumerate(self._originals) for _ in get_texts(message)]
        pairs = itertools.pairwise(numbers)
        is_sorted_in_messages = all(one < other for one, other in pairs if owners[one] == owners[other])
        return is_sorted_in_messages and stand_once([owners[number] for number in numbers], owners, self._originals)

    def fit_into(self, around: Sequence[str], text: str) -> bool:
        """Whether a text with the real texts can have these pieces `around` them."""
        return _has_pieces(around, text) if self._keeps_texts else _stand_in_order(around, text)

    def _mark(self, message: Mapping[str, Any], word: str) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._mark_text(content, word)}
        parts = [
            {**part, "text": self._mark_text(part["text"], word)} if part["type"] == "text" else part
            for part in content
        ]
        return {**message, "content": parts}

    def _mark_text(self, text: str, word: str) -> str:
        name = f"{word}New{len(self.names)}z"
        self.names.append(name)
        return text + name if self._keeps_texts else name


def stand_once(shown: Sequence[int], expected: Sequence[int], new: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the texts of new messages, named by the messages' indices, stand once each and in order.

    Results that follow each other may stand in another order: some templates sort them as the calls are. Images are not
    named, and must stand in order.
    """
    if shown == expected:
        return True
    has_images = any(part["type"] != "text" for message in new for part in _get_parts(message))
    if has_images or sorted(shown) != sorted(expected):
        return False
    groups = [index for index, _ in itertools.groupby(shown)]
    is_torn = len(groups) > len(set(groups))  # the texts of one result must stay together
    runs = _number_runs(new)
    return not is_torn and [runs[index] for index in shown] == [runs[index] for index in expected]


def _number_runs(new: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each message the number of its run: results that follow each other are one run, any other message is one."""
    is_result = [message["role"] == "tool" for message in new]
    before = [False, *is_result]
    return list(itertools.accumulate(not (this and last) for this, last in zip(is_result, before, strict=False)))


def _get_parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else ()


def _has_words(message: Mapping[str, Any]) -> bool:
    """Whether its content is more than white space."""
    return any(map(str.strip, get_texts(message)))


def _add_to_content(content: Any, sentinel: str) -> Any:
    if isinstance(content, str):
        return content + sentinel
    return [*content[:-1], {"type": "text", "text": (content[-1]["text"] if content else "") + sentinel}]


def _read_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call; empty if there are none, or they are no object."""
    given = call["function"].get("arguments")
    arguments = parse_arguments(given) if isinstance(given, str) else given
    return arguments if isinstance(arguments, Mapping) else {}


def _mark_call(call: Mapping[str, Any], word: str, number: int, *, is_bare: bool) -> tuple[dict[str, Any], list[str]]:
    """The call with sentinels in its arguments, or at the end of its name if it is bare; and the sentinels."""
    if is_bare and not _read_arguments(call):
        return _add_to_name(call, f"{word}Name{number}z")
    return _add_to_arguments(call, f"{word}Call{number}")


def _add_to_arguments(call: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The call with a sentinel at the end of each argument, or as its only one; and the sentinels."""
    function = call["function"]
    arguments = _read_arguments(call) or {prefix: ""}
    sentinels = [f"{prefix}z{number}z" for number in range(len(arguments))]
    values = {
        key: value + sentinel if isinstance(value, str) else sentinel
        for (key, value), sentinel in zip(arguments.items(), sentinels, strict=True)
    }
    changed = json.dumps(values, ensure_ascii=False) if isinstance(function.get("arguments"), str) else values
    return {**call, "function": {**function, "arguments": changed}}, sentinels


def _add_to_name(call: Mapping[str, Any], sentinel: str) -> tuple[dict[str, Any], list[str]]:
    """The call with a sentinel at the end of its name, and that."""
    function = call["function"]
    return {**call, "function": {**function, "name": function["name"] + sentinel}}, [sentinel]


def _stand_in_order(pieces: Sequence[str], text: str) -> bool:
    """Whether a text begins with the first piece, ends with the last, and has the others between them in order."""
    if len(pieces) == 1:
        return text == pieces[0]
    position, stop = len(pieces[0]), len(text) - len(pieces[-1])
    for piece in pieces[1:-1]:
        found = text.find(piece, position, max(stop, 0))
        if found < 0:
            return False
        position = found + len(piece)
    return text.startswith(pieces[0]) and text.endswith(pieces[-1]) and position <= stop


def _has_pieces(pieces: Sequence[str], text: str) -> bool:
    """Whether a text is these pieces. White space at the end of each, which a template may cut, does not count."""
    *others, last = pieces
    return (
        re.fullmatch("".join(rf"{re.escape(each.rstrip())}\s*" for each in others) + re.escape(last), text) is not None
    )
