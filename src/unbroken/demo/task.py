"""The demo's task: follow a chain of lookups whose length the model cannot know.

    user       Start at "raka". Write compact JSON.
    assistant  <tool_call>{"name":"lookup","arguments":{"key":"raka"}}</tool_call>
    tool       {"next": "tuvo"}
    assistant  <tool_call>{"name":"lookup","arguments":{"key":"tuvo"}}</tool_call>
    tool       {"value": "pemi"}
    assistant  Answer: "pemi"

The reward is 1 for exactly that answer and 0 for anything else. Keys and values are two syllables each and no syllable
comes twice in a task, so what has to be copied is never ambiguous.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from unbroken.messages import Message, get_text

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
NUM_LOOKUPS = (2, 3)
"""Fewest and most lookups that lead to the value."""


class JsonStyle(StrEnum):
    """How the user asks for tool calls to be written."""

    CANONICAL = "canonical"
    """With the spaces that the chat template itself writes."""
    COMPACT = "compact"
    """Without spaces, as many models write JSON."""

    @property
    def separators(self) -> tuple[str, str]:
        """Item and key separators, as `json.dumps` takes them."""
        return (", ", ": ") if self is JsonStyle.CANONICAL else (",", ":")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTask:
    """One chain: looking up `keys[i]` names `keys[i + 1]`, and looking up the last key gives `value`."""

    keys: tuple[str, ...]
    value: str
    style: JsonStyle

    @classmethod
    def draw(cls, rng: random.Random, style: JsonStyle | None = None) -> LookupTask:
        """Draw a task; without a `style`, both are equally likely."""
        num_lookups = rng.randint(*NUM_LOOKUPS)
        syllables = rng.sample(SYLLABLES, 2 * (num_lookups + 1))
        words = [a + b for a, b in zip(syllables[::2], syllables[1::2], strict=True)]
        return cls(keys=tuple(words[:-1]), value=words[-1], style=style or rng.choice(list(JsonStyle)))

    @property
    def prompt(self) -> str:
        """What the user says."""
        request = " Write compact JSON." if self.style is JsonStyle.COMPACT else ""
        return f'Start at "{self.keys[0]}".{request}'

    @property
    def answer(self) -> str:
        """What the model should say in the end."""
        return answer_text(self.value)

    def look_up(self, key: str) -> dict[str, str]:
        """What the tool returns for `key`."""
        if key not in self.keys:
            return {"error": "no such key"}
        position = self.keys.index(key)
        return {"next": self.keys[position + 1]} if position + 1 < len(self.keys) else {"value": self.value}

    async def reward(self, messages: Sequence[Message]) -> float:
        """1.0 if the last message is the assistant's right answer, else 0.0; async, to be called without a thread."""
        last = messages[-1]
        return float(last["role"] == "assistant" and get_text(last["content"]).strip() == self.answer)


def answer_text(value: str) -> str:
    """The form of a final answer."""
    return f'Answer: "{value}"'


def call_text(key: str, style: JsonStyle) -> str:
    """A tool call as the model is shown to write it."""
    call = {"name": "lookup", "arguments": {"key": key}}
    return f"<tool_call>\n{json.dumps(call, separators=style.separators)}\n</tool_call>"
