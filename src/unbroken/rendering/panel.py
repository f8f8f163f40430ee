"""The panel: synthetic histories before which the bridge must come out the same.

A history is spelled with one letter per message, and a number repeats what stands in brackets:

    s system      a assistant text               c one call          t the next call's result
    u user        r assistant text, reasoned     d two calls         b a very long user message
    e empty user  x one call beside text         q one call, reasoned
"""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.messages import Message, ToolCall
from unbroken.rendering.forms import PROBE_NAMES, probe_call

HISTORY_TEXT, HISTORY_REASONING = "Hq7Text", "Hq7Reasoning"
_CALL_LETTERS = frozenset("cdqx")
_MOST_REPEATS = 200
_MOST_LISTED_REPEATS = 8
_LONGEST_TEXT = 50_000

_CHATS = (
    "u", "su", "e", "eae", "uu", "suu", "uau", "suau", "uru", "sururu", "usu", "b", "sbab",
    *("u" + "au" * k for k in range(2, _MOST_LISTED_REPEATS + 1)),
    *("su" + "au" * k for k in range(2, _MOST_LISTED_REPEATS + 1)),
    "su" + "au" * 20,
)  # fmt: skip
_TOOL_CYCLES = (
    "udtt", "sudttau", "udttauctau", "uqtqt", "suqtru", "uxt", "uctu", "sudttdtt",
    *("u" + "ct" * k for k in range(1, _MOST_LISTED_REPEATS + 1)),
    *("su" + "ct" * k + "au" for k in range(1, _MOST_LISTED_REPEATS + 1)),
)  # fmt: skip
_RESULTS_OF_TEXT = ("uat", "suatatau")


def histories(*, renders_calls: bool) -> Iterator[str]:
    """The spellings that every template is tried with, the empty history aside."""
    yield from _CHATS
    yield from _TOOL_CYCLES if renders_calls else _RESULTS_OF_TEXT


def counted_histories(*, renders_calls: bool, integers: tuple[int, ...]) -> Iterator[str]:
    """Spellings with about as many messages, questions or results as the constants at which a template may change."""
    exchanges = {k for n in integers for k in (*range(n - 3, n + 3), *range((n - 7) // 2, (n + 5) // 2))}
    for k in sorted(k for k in exchanges if _MOST_LISTED_REPEATS < k <= _MOST_REPEATS):
        yield "u" + "au" * k
        yield "su" + "au" * k
    results = {k for n in integers for k in range(n - 2, n + 3)} if renders_calls else set()
    for k in sorted(k for k in results if _MOST_LISTED_REPEATS < k <= _MOST_REPEATS):
        yield "u" + "ct" * k


def length_of_long_text(integers: tuple[int, ...]) -> int:
    """Characters of a very long message: longer than any constant the template may compare a length with."""
    return max([1500, *_lengths(integers)]) + 20


def texts_of_lengths(integers: tuple[int, ...]) -> Iterator[str]:
    """A very short text, a very long one, and those about as long as the constants."""
    yield "~"
    yield "~" * length_of_long_text(integers)
    yield from ("~" * k for k in sorted({k for n in _lengths(integers) for k in (n - 1, n, n + 1)}))


def _lengths(integers: tuple[int, ...]) -> list[int]:
    return [n for n in integers if n <= _LONGEST_TEXT]


def build_history(
    spelling: str, *, long_text: int, texts: dict[str, str] | None = None, call_id_prefix: str = "hist"
) -> list[Message]:
    """The messages of a spelling; `texts` puts another text into the messages of a role."""
    messages: list[Message] = []
    num_calls = num_answered = 0
    for letter in spelling:
        role = {"s": "system", "u": "user", "b": "user", "e": "user", "t": "tool"}.get(letter, "assistant")
        message: Message = {"role": role, "content": (texts or {}).get(role, HISTORY_TEXT)}
        if letter == "b":
            message["content"] = "Hq7 long " * (long_text // 9 + 1)
        if letter == "e":
            message["content"] = ""
        if letter in "rq":
            message["reasoning_content"] = HISTORY_REASONING
        if letter in _CALL_LETTERS:
            message["content"] = message["content"] if letter == "x" else ""
            ids = range(num_calls, num_calls + (2 if letter == "d" else 1))
            message["tool_calls"] = [_call(k, call_id_prefix) for k in ids]
            num_calls = ids.stop
        if letter == "t":
            message |= {"tool_call_id": f"{call_id_prefix}{num_answered:05d}", "name": _name(num_answered)}
            num_answered += 1
        messages.append(message)
    return messages


def _call(number: int, call_id_prefix: str) -> ToolCall:
    return probe_call(_name(number), f"{call_id_prefix}{number:05d}", {"value": "Hq7Argument"})


def _name(number: int) -> str:
    return PROBE_NAMES[number % 2]
