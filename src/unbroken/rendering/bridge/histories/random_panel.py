"""The random panel: conversations that combine everything that a template reads.

The listed histories of `panel` vary one thing at a time. A template may also depend on several at once (a text *and* a
second tool *and* a long history). So conversations are drawn in which each of them is there with some chance; a
dependence on three things at once that is there in one conversation of eight is missed by 100 conversations with a
probability of about one in a million. The draws are the same in each examination.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unbroken.messages import Message
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY, HistoryClass
from unbroken.rendering.bridge.histories.panel import HISTORY_TEXT, MAX_TEXT_LENGTH
from unbroken.rendering.jinja.reads import ReadKind, TemplateReads
from unbroken.rendering.message_format import PROBE_NAMES, probe_call

_NUM_STRUCTURES = 48
_NUM_TEXTS = 100
_MAX_ATTEMPTS = 12
_MAX_ARGUMENTS = 20
_MAX_LISTED = 8
_USUAL_ROLES = ("user", "user", "user", "system", "developer")
_USUAL_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"})
SAME_TEXT = "Hq7Same"
_MANY_WORDS = "Hq7 long " * 200
_PREDICATES = {
    **dict.fromkeys(("isdigit", "isdecimal", "isnumeric"), "42"),
    "isalnum": "abc42",
    "isalpha": "abc",
    "islower": "abc",
    "isupper": "ABC",
    "istitle": "Abc Def",
    "isspace": " \n",
    "isidentifier": "abc_d",
    "isprintable": "a\x07b",
    "isascii": "Größe",
}
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"value": "Hq7Argument"},
    {"value": {"inner": [1, {"deep": None}], "flag": True}, "n": 3},
    {"a": 1, "b": 2.5, "c": None, "d": False},
    {"items": []},
)
_OTHER_VALUES: tuple[Any, ...] = (True, False, 1, 0, "", "Hq7Value", ["Hq7Value"], {"value": 1})
_READ_TEXTS = frozenset(
    {ReadKind.TEXT, ReadKind.LENGTH, ReadKind.KEY, ReadKind.PREDICATE, ReadKind.EQUAL, ReadKind.OPAQUE}
)


class RandomPanel:
    """Draws histories of one class for one template. `texts` are those that the template may compare with."""

    def __init__(
        self,
        *,
        reads: TemplateReads,
        texts: Sequence[str],
        lengths: Sequence[int],
        renders_calls: bool,
        history_class: HistoryClass,
    ) -> None:
        self._reads = reads
        self._class = history_class
        self._renders_calls = renders_calls
        self._all_texts = tuple(texts)
        self._texts = [text for text in texts if not history_class.excludes_any([text])]
        self._lengths = [length for length in lengths if length <= MAX_TEXT_LENGTH]
        self._keys = sorted(key for key in reads.keys - _USUAL_KEYS if key)
        self.items = sorted(str(item) for item in reads.get_all_values(ReadKind.ITEM))
        """Keys inside messages, such as those of arguments, that the template looks for."""
        self._numbers = [number for number in (*lengths, 4) if number <= _MAX_ARGUMENTS]
        roles = (*_USUAL_ROLES, *sorted(reads.roles - {"assistant", "tool", "user", "system"}))
        self._roles = tuple(role for role in roles if role != "system" or history_class.has_system is not False)
        predicates = (str(name) for name in reads.get_values(ReadKind.PREDICATE))
        self._samples = [_PREDICATES.get(name, "42") for name in predicates]
        self.reads_texts = any(read.kind in _READ_TEXTS for read in reads.of_history)
        """Whether the texts of a history may change what comes after the turn."""
        self.reads_new_texts = self.reads_texts or any(read.kind in _READ_TEXTS for read in reads.of_turn)
        """The same for texts of new messages, which the template may read in another way than those of a history."""
        self.reads_equality = reads.has(ReadKind.EQUAL)
        """Whether it may depend on whether two texts are equal."""

    def draw_histories(self, num: int | None = None) -> Iterator[list[Message]]:
        """Draw the histories, by default as many as the template's reads need."""
        rng = random.Random(0)
        usual = _NUM_TEXTS if self.reads_texts else _NUM_STRUCTURES
        for _ in range(num or (usual if self._class == ANY_HISTORY else 2 * usual)):
            for _ in range(_MAX_ATTEMPTS):
                history = self._draw_history(rng)
                if self._class.includes(history):
                    yield history
                    break

    def draw_new_messages(self, messages: Sequence[Message], num: int) -> Iterator[tuple[Message, ...]]:
        """Draw other texts and keys for the new messages of an example. Of these, no class excludes any texts."""
        rng = random.Random(1)
        for number in range(num):
            drawn: list[Message] = []
            for message in messages:
                others = {key: self._draw_value(rng) for key in self._keys if rng.random() < 0.5}
                if self._all_texts and rng.random() < 0.3:
                    text = rng.choice(self._all_texts)
                else:
                    text = self.draw_text(rng, 0.2 if number else 0.0)
                content = text if isinstance(message["content"], str) else message["content"]
                drawn.append({**message, "content": content, **others})  # type: ignore[typeddict-item]
            yield tuple(drawn)

    def list_texts(self) -> Iterator[str]:
        """Texts that the template may read something of, one for each thing that it reads."""
        yield from ("", "42", _MANY_WORDS)
        yield from self._all_texts[:_MAX_LISTED]
        yield from dict.fromkeys(self._samples)
        yield from ("~" * (number + more) for number in self._lengths[:_MAX_LISTED] for more in (-1, 0, 1))

    def draw_text(self, rng: random.Random, plainness: float) -> str:
        """One text: plain with this probability, else one that the template may read something of."""
        if rng.random() < plainness:
            return HISTORY_TEXT
        kind = rng.randrange(8)
        if kind < 4 and self._texts:
            return self._draw_constants(rng)
        if kind == 4:
            return rng.choice(("", "", "\n", " ", HISTORY_TEXT + "\n"))
        if kind == 5:
            return SAME_TEXT
        if kind == 6 and self._lengths:
            return "~" * max(rng.choice(self._lengths) + rng.choice((-1, 0, 1, 2)), 0)
        return rng.choice(("42", "a", _MANY_WORDS, *self._samples, *self._samples))

    def _draw_constants(self, rng: random.Random) -> str:
        chosen = [rng.choice(self._texts) for _ in range(rng.choice((1, 1, 2, 3)))]
        if rng.random() < 0.1:
            chosen = [text.upper() for text in chosen]
        pattern = rng.randrange(4)
        if pattern == 0:
            return chosen[0]
        words = [*chosen, HISTORY_TEXT]
        if pattern == 1:
            rng.shuffle(words)
        separator = rng.choice(("", " ", "\n"))
        return separator.join((*words, chosen[0]) if pattern == 2 else words)

    def _draw_history(self, rng: random.Random) -> list[Message]:
        is_odd = rng.random() < 0.35 and not self._class.is_regular
        draw = _Draw(rng, rng.choice((0.3, 0.7, 0.9)), is_odd)
        messages: list[Message] = []
        if (rng.random() < 0.4 and self._class.has_system is not False) or self._class.has_system:
            messages.append(self._say(draw, "system"))
        if not draw.is_odd or rng.random() < 0.7:
            messages.append(self._say(draw, "user"))
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 5, 9))):
            messages += self._draw_exchange(draw)
        if draw.is_odd and rng.random() < 0.4:
            del messages[rng.randrange(len(messages) + 1) :]
        if self._class.ends_in_result and self._renders_calls:
            messages += self._draw_calls(draw)
        if not messages or (messages[-1]["role"] == "tool" and self._class.ends_in_result is False):
            messages.append(self._say(draw, "user"))
        return messages

    def _draw_exchange(self, draw: _Draw) -> Iterator[Message]:
        rng = draw.rng
        may_call = not self._class.is_regular or self._class.has_results is not False
        calls_tools = rng.random() < (0.7 if self._class.has_results else 0.5) and may_call
        if calls_tools and self._renders_calls:
            yield from self._draw_calls(draw)
        else:
            yield self._say(draw, "assistant")
            if calls_tools and self._class.has_results is not False:
                yield self._say(draw, "tool")
        if draw.is_odd and rng.random() < 0.3:
            yield self._say(draw, "assistant")
        if not calls_tools or rng.random() < (0.6 if draw.is_odd else 0.3):
            may_answer_nothing = draw.is_odd and self._class.has_results is not False
            roles = (*self._roles, "tool") if may_answer_nothing else self._roles
            is_usual = self._class.is_regular or (not draw.is_odd and rng.random() < 0.8)
            role = "user" if is_usual else rng.choice(roles)
            yield self._say(draw, role)

    def _draw_calls(self, draw: _Draw) -> Iterator[Message]:
        """A turn with calls, and results, not always of all of them."""
        rng = draw.rng
        turn = self._say(draw, "assistant")
        if rng.random() < 0.7:
            turn["content"] = ""
        numbers = range(draw.num_calls, draw.num_calls + rng.choice((1, 1, 1, 2, 2, 3, 4, 6)))
        draw.num_calls = numbers.stop
        names = [self._draw_name(rng) for _ in numbers]
        turn["tool_calls"] = [
            probe_call(name, f"rand{k:05d}", self.draw_arguments(rng)) for k, name in zip(numbers, names, strict=True)
        ]
        yield turn
        if self._class.has_results is False:
            return
        answered = list(zip(numbers, names, strict=True))
        if draw.is_odd:
            answered = answered[: rng.randrange(len(answered) + 1)]
        for k, name in answered:
            result = self._say(draw, "tool")
            result |= {"tool_call_id": f"rand{k:05d}", "name": name}
            yield result

    def _draw_name(self, rng: random.Random) -> str:
        names = [text for text in self._texts if text.isidentifier()] if rng.random() < 0.3 else []
        return rng.choice(names or PROBE_NAMES)

    def draw_arguments(self, rng: random.Random) -> dict[str, Any]:
        """Arguments of one call: of many types and numbers, with keys that the template looks for."""
        arguments = dict(rng.choice(_ARGUMENTS))
        if self._texts and rng.random() < 0.2:
            arguments[rng.choice(("value", rng.choice(self._texts)))] = rng.choice(self._texts)
        arguments |= {item: self._draw_value(rng) for item in self.items if rng.random() < 0.4}
        num_arguments = rng.choice(self._numbers) + rng.choice((-1, 0, 1)) if rng.random() < 0.3 else 0
        return arguments | {f"n{k}": k for k in range(num_arguments - len(arguments))}

    def _say(self, draw: _Draw, role: str) -> Message:
        rng = draw.rng
        message: Message = {"role": role, "content": self.draw_text(rng, draw.plainness)}
        if role == "assistant" and rng.random() < 0.3:
            message["reasoning_content"] = self.draw_text(rng, 0.7)
        if role == "user" and rng.random() < 0.1:
            message["name"] = rng.choice(("Hq7Name", "", *self._texts[:8]))
        keys = () if self._class.is_regular else self._keys
        others: Mapping[str, Any] = {
            key: self._draw_value(rng) for key in keys if rng.random() < 0.15 * (1 - draw.plainness) + 0.05
        }
        return {**message, **others}  # type: ignore[typeddict-item]

    def _draw_value(self, rng: random.Random) -> Any:
        return rng.choice(self._texts) if self._texts and rng.random() < 0.3 else rng.choice(_OTHER_VALUES)


class _Draw:
    """The state of one history that is drawn."""

    def __init__(self, rng: random.Random, plainness: float, is_odd: bool) -> None:
        self.rng = rng
        self.plainness = plainness
        self.is_odd = is_odd
        """Whether messages come in an unusual order, or are missing."""
        self.num_calls = 0
