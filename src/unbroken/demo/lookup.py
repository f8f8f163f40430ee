"""The lookup task: follow a chain of tool calls whose length the model cannot know.

    user       Start at "raka". Write compact JSON.
    assistant  <tool_call>{"name":"lookup","arguments":{"key":"raka"}}</tool_call>
    tool       {"next": "tuvo"}
    assistant  <tool_call>{"name":"lookup","arguments":{"key":"tuvo"}}</tool_call>
    tool       {"value": "pemi"}
    assistant  Answer: "pemi"

The reward is 1 for exactly that answer and 0 for anything else. Keys and values are two syllables each, and no syllable
occurs twice in a task, so it is always clear which word to copy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.messages import Message, ToolSchema, get_text
from unbroken.rollout.env import Continue, Done, Outcome, Reply
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, tool
from unbroken.runs.collector import Problems

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
MIN_LOOKUPS, MAX_LOOKUPS = 2, 3
EXPLANATION = (
    ' Call the tool lookup with this key. While it returns {"next": KEY}, call it again with that key. '
    'When it returns {"value": VALUE}, write: Answer: "VALUE"'
)
"""What follows in the prompt of a model that was not trained on the task."""


class JsonStyle(StrEnum):
    """How the user asks for tool calls to be written."""

    CANONICAL = "canonical"
    """With spaces, like the chat template."""
    COMPACT = "compact"
    """Without spaces, as many models write JSON."""

    @property
    def separators(self) -> tuple[str, str]:
        """Item and key separators, as `json.dumps` takes them."""
        return (", ", ": ") if self is JsonStyle.CANONICAL else (",", ":")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTask:
    """One chain: looking up `keys[i]` gives `keys[i + 1]`, and looking up the last key gives `value`."""

    keys: tuple[str, ...]
    value: str
    style: JsonStyle

    @classmethod
    def draw(cls, rng: random.Random, style: JsonStyle | None = None) -> LookupTask:
        """Draw a task; without a `style`, both are equally likely."""
        num_lookups = rng.randint(MIN_LOOKUPS, MAX_LOOKUPS)
        syllables = rng.sample(SYLLABLES, 2 * (num_lookups + 1))
        words = [a + b for a, b in zip(syllables[::2], syllables[1::2], strict=True)]
        return cls(keys=tuple(words[:-1]), value=words[-1], style=style or rng.choice(list(JsonStyle)))

    @property
    def prompt(self) -> str:
        """The user's message."""
        request = " Write compact JSON." if self.style is JsonStyle.COMPACT else ""
        return f'Start at "{self.keys[0]}".{request}'

    def look_up(self, key: str) -> dict[str, str]:
        """The tool's result for `key`."""
        if key not in self.keys:
            return {"error": "no such key"}
        position = self.keys.index(key)
        return {"next": self.keys[position + 1]} if position + 1 < len(self.keys) else {"value": self.value}

    async def reward(self, messages: Sequence[Message]) -> float:
        """1.0 if the last message is the assistant's right answer, else 0.0. Async, so that it needs no thread."""
        last = messages[-1]
        return float(last["role"] == "assistant" and get_text(last["content"]).strip() == answer_text(self.value))


def lookup_env(task: LookupTask) -> ToolEnv:
    """The environment of one episode."""
    return ToolEnv([{"role": "user", "content": task.prompt}], [lookup_tool(task)], task.reward)


class LookupConversation(ToolEnv):
    """The task with an explanation, for a model that was not trained on it, and a question about it afterwards.

    `unbroken eval unbroken.demo.lookup:LookupConversation`; the reward is that of the answer. Without being `explained`
    it is the demo's own task, for its model.
    """

    def __init__(self, number: int, seed: int, explained: bool = True) -> None:
        """Make conversation `number`; the same `seed` gives the same ones."""
        style = JsonStyle.CANONICAL if explained else style_of(number)
        self._task = task = LookupTask.draw(random.Random(f"{seed} conversation {number}"), style)
        prompt = task.prompt
        if explained:
            prompt += EXPLANATION
        super().__init__([{"role": "user", "content": prompt}], [lookup_tool(task)], self._reward_first)
        self._is_question_left = explained

    async def step(self, reply: Reply) -> Outcome:
        """Answer calls; after the first answer without calls, ask the question."""
        outcome = await super().step(reply)
        if isinstance(outcome, Done) and self._is_question_left:
            self._is_question_left = False
            return Continue(messages=[{"role": "user", "content": "Which keys did you look up, in order?"}])
        return outcome

    async def _reward_first(self, messages: Sequence[Message]) -> float:
        """The reward of the answer to the task, before the question."""
        users = [k for k, each in enumerate(messages) if each["role"] == "user"]
        return await self._task.reward(messages[: users[1]] if len(users) > 1 else messages)


def lookup_tool(task: LookupTask) -> Tool:
    """The tool of a task."""

    @tool
    async def lookup(key: str) -> dict[str, str]:
        """Look up a key.

        Args:
            key: The key.
        """
        return task.look_up(key)

    return lookup


def lookup_problems(name: str, seed: int) -> Problems:
    """Tasks to train or to evaluate on; every second one asks for compact JSON. Another `name` gives other tasks."""

    def draw(number: int) -> LookupTask:
        return LookupTask.draw(random.Random(f"{seed} {name} {number}"), style_of(number))

    def row(number: int) -> dict[str, Any]:
        task = draw(number)
        return {"index": number, "columns": {"keys": list(task.keys), "answer": answer_text(task.value)}}

    return Problems(env=lambda number: lookup_env(draw(number)), row=row)


def style_of(number: int) -> JsonStyle:
    """The style of problem `number`."""
    styles = list(JsonStyle)
    return styles[number % len(styles)]


def tool_schemas() -> list[ToolSchema]:
    """The tools as the model sees them, which are the same for every task."""
    return [lookup_tool(LookupTask.draw(random.Random(0))).schema]


def call_text(key: str, style: JsonStyle) -> str:
    """A tool call as the model should write it."""
    call = {"name": "lookup", "arguments": {"key": key}}
    return f"<tool_call>\n{json.dumps(call, separators=style.separators)}\n</tool_call>"


def answer_text(value: str) -> str:
    """A final answer as the model should write it."""
    return f'Answer: "{value}"'
