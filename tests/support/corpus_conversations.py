"""Random conversations for the corpus: every kind of turn and of messages after it, in a form that can be judged.

A scenario is the turn's calls and text, and the roles and keys of what follows. A run over one template draws from a
pool of some scenarios, mostly usual ones; pools differ between templates.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.conversations import WORDS, random_text
from unbroken.messages import Message

TEXT_SCENARIOS = tuple(
    (0, text, following)
    for text in ("words", "empty", "blank")
    for following in ("u", "u", "s", "uu", "su", "us", "t", "tu", "tt")
)
CALL_SCENARIOS = tuple(
    (num_calls, text, following)
    for num_calls in (1, 2, 3)
    for text in ("empty", "words", "blank")
    for following in (
        "answers",
        "answers",
        "answers u",
        "answers s",
        "answers uu",
        "fewer",
        "repeated",
        "reversed",
        "u",
    )
)
USUAL = (
    *[(0, "words", "u")] * 4,
    (0, "words", "us"),
    (0, "empty", "u"),
    *[(1, "empty", "answers")] * 4,
    *[(1, "words", "answers")] * 2,
    *[(2, "empty", "answers")] * 3,
    (2, "words", "answers"),
    (3, "empty", "answers"),
    (1, "empty", "answers u"),
)
"""Scenarios of every pool."""
KEYS = (("name", "tool_call_id"), ("name", "tool_call_id"), ("tool_call_id",), ("name",), ())

Scenario = tuple[int, str, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConversation:
    """A history, the turn that ended, and the new messages, with words in them that occur once."""

    history: list[Message]
    assistant: Message
    new_messages: list[Message]
    turn_marks: tuple[str, ...]
    """In the turn's text and in its last call's arguments; empty if it has neither."""
    is_cut: bool = False
    """The turn, of text that ends with its mark, was cut by length: no stop was sampled."""

    @property
    def everything(self) -> list[Message]:
        return [*self.history, self.assistant, *self.new_messages]


def random_pool(rng: random.Random, *, num_rare: int, most_calls: int) -> list[Scenario]:
    """The usual scenarios with up to so many calls, and some others, of which a third is text only."""
    num_texts = num_rare // 3 if most_calls else num_rare
    rare = rng.sample(TEXT_SCENARIOS, num_texts) + rng.sample(CALL_SCENARIOS, num_rare - num_texts)
    usual = [scenario for scenario in USUAL if scenario[0] <= most_calls]
    return [*((*scenario, KEYS[0]) for scenario in usual), *((*scenario, rng.choice(KEYS)) for scenario in rare)]


def small_pool(*, most_calls: int) -> list[Scenario]:
    """A few scenarios that all templates support, to test many options."""
    few = [(0, "words", "u"), (0, "words", "us"), (1, "empty", "answers"), (2, "words", "answers")]
    return [(*scenario, KEYS[0]) for scenario in few if scenario[0] <= most_calls]


def judged_conversations(
    rng: random.Random, pool: Sequence[Scenario], words: Sequence[str] = WORDS, *, most_calls: int = 3
) -> Iterator[JudgedConversation]:
    """Generate conversations forever. Each history, with up to so many calls in a turn, is used for four of them."""
    while True:
        history = _random_history(rng, words, min(most_calls, 2))
        for _ in range(4):
            yield random_judged_conversation(rng, rng.choice(pool), history, words)


def random_judged_conversation(
    rng: random.Random, scenario: Scenario, history: list[Message], words: Sequence[str] = WORDS
) -> JudgedConversation:
    """A conversation of this scenario."""
    num_calls, text, following, keys = scenario
    mark = f"{rng.randrange(10**8):08d}"
    turn, answered = _random_turn(rng, num_calls, text, mark, words)
    new = [_random_following(rng, letter, answered, keys, words) for letter in _spelled(following, num_calls)]
    marks = (*((f"said{mark}",) if text == "words" else ()), *((f"call{mark}",) if num_calls else ()))
    is_cut = marks == (f"said{mark}",) and words is WORDS and rng.random() < 0.3
    return JudgedConversation(history=history, assistant=turn, new_messages=new, turn_marks=marks, is_cut=is_cut)


def _random_history(rng: random.Random, words: Sequence[str], most_calls: int) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": random_text(rng, words)})
    messages.append({"role": "user", "content": random_text(rng, words)})
    for _ in range(rng.choices((0, 1, 2, 3, 6, 12), weights=(40, 25, 15, 10, 6, 2))[0]):
        num_calls = min(rng.choice((0, 0, 1, 1, 2)), most_calls)
        turn, answered = _random_turn(rng, num_calls, rng.choice(("empty", "words")), "", words)
        following = "answers" if num_calls else rng.choice(("u",) * 8 + ("s", "t"))
        if rng.random() < 0.1:
            following += " u" if num_calls else "u"
        messages.append(turn)
        messages += [
            _random_following(rng, letter, answered, KEYS[0], words) for letter in _spelled(following, num_calls)
        ]
        if num_calls and rng.random() < 0.5:
            messages.append(_random_turn(rng, 0, "words", "", words)[0])
            messages.append({"role": "user", "content": random_text(rng, words)})
    return messages


def _random_turn(
    rng: random.Random, num_calls: int, text: str, mark: str, words: Sequence[str]
) -> tuple[Message, list[tuple[str, str]]]:
    """A turn, and the names and ids of its calls."""
    content = {"empty": "", "blank": rng.choice(("\n", "  ", "\n\n"))}.get(text)
    turn: Message = {
        "role": "assistant",
        "content": f"{random_text(rng, words)}said{mark}" if content is None else content,
    }
    if rng.random() < 0.3:
        turn["reasoning_content"] = "I think " + random_text(rng, words)
    answered = []
    for _ in range(num_calls):
        name, call_id = rng.choice(("add", "search", "get_weather")), f"call{rng.randrange(36**5):05d}"[:9]
        arguments: dict[str, Any] = {"a_text": random_text(rng, words), "n": rng.randrange(99)}
        if rng.random() < 0.2:
            arguments = {"items": [1, {"deep": None}], **arguments}
        if len(answered) == num_calls - 1:
            arguments["z"] = f"call{mark}"
        answered.append((name, call_id))
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})  # type: ignore[typeddict-item]
    return turn, answered


def _spelled(following: str, num_calls: int) -> list[tuple[str, int]]:
    """Roles of the new messages, and which call each answers."""
    first, _, rest = following.partition(" ")
    calls = list(range(num_calls))
    answered = {
        "answers": calls,
        "fewer": calls[:-1] or calls,
        "repeated": [*calls, calls[-1] if calls else 0],
        "reversed": calls[::-1],
    }.get(first)
    roles = [("t", k) for k in answered] if answered is not None else [(letter, -1) for letter in first]
    return roles + [(letter, -1) for letter in rest]


def _random_following(
    rng: random.Random,
    spelled: tuple[str, int],
    answered: list[tuple[str, str]],
    keys: tuple[str, ...],
    words: Sequence[str],
) -> Message:
    letter, call = spelled
    text = random_text(rng, words)
    if rng.random() < 0.85:
        text += f"new{rng.randrange(10**8):08d}" + rng.choice(("", random_text(rng, words)))
    message: Message = {"role": {"u": "user", "s": "system", "t": "tool"}[letter], "content": text}
    if letter == "t" and call < 0:
        message["name"] = "search"
    if letter == "t" and call >= 0:
        name, call_id = answered[call]
        message |= {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if key in keys}  # type: ignore[typeddict-item]
    return message
