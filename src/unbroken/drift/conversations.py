"""The conversations to sample: lookup tasks of the demo's kind, or prompts from a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from unbroken.demo.lookup import JsonStyle, LookupTask, answer_text, lookup_env, lookup_tool, style_of
from unbroken.errors import InvalidInputError, MessagesError
from unbroken.messages import Message, check_conversation
from unbroken.rollout.env import Continue, Done, Env, Outcome, Reply
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, tool
from unbroken.untrusted import MAX_ROWS_BYTES, read_json, read_text

MakeEnv: TypeAlias = Callable[[int], Env]
"""Makes the environment of conversation 0, 1, 2, ..."""
_QUESTION = "Which keys did you look up, in order?"
_DEMO_OR_FILE = "'demo' or a file with one JSON object in each line"
_KEYS = frozenset({"prompt", "messages", "results", "follow_ups"})


class DialogueEnv(ToolEnv):
    """Answers tool calls and, after an answer without calls, asks the next of `follow_ups`. It has no reward."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], follow_ups: Sequence[str]) -> None:
        super().__init__(messages, tools, _give_no_reward)
        self._follow_ups = list(follow_ups)

    async def step(self, reply: Reply) -> Outcome:
        """Answer calls; after an answer without calls, ask the next question."""
        outcome = await super().step(reply)
        if isinstance(outcome, Done) and self._follow_ups:
            return Continue(messages=[{"role": "user", "content": self._follow_ups.pop(0)}])
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A conversation from a file."""

    messages: Sequence[Message]
    results: Mapping[str, Any] | None = None
    """What the tool `lookup` finds under each key; None for a conversation without tools."""
    follow_ups: Sequence[str] = field(default=())

    def make_env(self) -> DialogueEnv:
        """Make the environment of one conversation."""
        return DialogueEnv(
            self.messages, [] if self.results is None else [_make_lookup_tool(self.results)], self.follow_ups
        )


def make_demo_tasks(seed: int) -> MakeEnv:
    """The demo's own tasks, as its model knows them; every second one asks for compact JSON."""

    def make_env(number: int) -> Env:
        return lookup_env(LookupTask.draw(_seed_task(seed, number), style_of(number)))

    return make_env


def make_lookup_tasks(seed: int) -> MakeEnv:
    """The same tasks with an explanation for a model that was not trained on them, and a question afterwards."""

    def make_env(number: int) -> Env:
        task = LookupTask.draw(_seed_task(seed, number), JsonStyle.CANONICAL)
        prompt = (
            f'{task.prompt} Call the tool lookup with this key. While it returns {{"next": KEY}}, call it again with '
            f'that key. When it returns {{"value": VALUE}}, write: {answer_text("VALUE")}'
        )
        return DialogueEnv([{"role": "user", "content": prompt}], [lookup_tool(task)], [_QUESTION])

    return make_env


def load_prompts(file: Path) -> MakeEnv:
    """Load conversations from a file with one JSON object in each line; conversation k begins with row k % n.

    A row has `prompt` (text) or `messages`, and by choice `results` (an object: what the tool `lookup` finds under each
    key) and `follow_ups` (a list of texts, which the user says after each answer without calls).

    Raises:
        InvalidInputError: the file cannot be read, or a row is malformed.
    """
    try:
        lines = read_text(file, max_bytes=MAX_ROWS_BYTES).split("\n")
    except (OSError, InvalidInputError) as error:
        raise InvalidInputError(f"--prompts must be {_DEMO_OR_FILE}, got {str(file)!r}: {error}") from None
    rows = [_read_row(f"{file}, line {k + 1}", line) for k, line in enumerate(lines) if line.strip()]
    if not rows:
        raise InvalidInputError(f"--prompts must have at least one row, and {file} is empty")
    return lambda number: rows[number % len(rows)].make_env()


def _read_row(place: str, line: str) -> PromptRow:
    try:
        row = read_json(line, max_bytes=MAX_ROWS_BYTES)
    except InvalidInputError as error:
        raise InvalidInputError(f"{place} must be a JSON object: {error}") from None
    if not isinstance(row, dict) or not set(row) <= _KEYS or ("prompt" in row) == ("messages" in row):
        keys = repr(sorted(row) if isinstance(row, dict) else row)[:300]
        raise InvalidInputError(
            f"{place} must be an object with prompt or messages, and by choice results and follow_ups, got {keys}"
        )
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    try:
        check_conversation(messages)
    except MessagesError as error:
        raise InvalidInputError(f"{place}: {error}") from None
    results, follow_ups = row.get("results"), row.get("follow_ups", [])
    if not (results is None or isinstance(results, dict)):
        raise InvalidInputError(f"{place}: results must be an object, got {results!r}")
    if not (isinstance(follow_ups, list) and all(isinstance(text, str) for text in follow_ups)):
        raise InvalidInputError(f"{place}: follow_ups must be a list of texts, got {follow_ups!r}")
    if not isinstance(messages[-1].get("content"), (str, list)) or messages[-1]["role"] == "assistant":
        raise InvalidInputError(f"{place}: the last message must have a text, and not be the assistant's")
    return PromptRow(messages=messages, results=results, follow_ups=follow_ups)


def _make_lookup_tool(results: Mapping[str, Any]) -> Tool:
    @tool
    async def lookup(key: str) -> Any:
        """Look up a key.

        Args:
            key: The key.
        """
        return results.get(key, {"error": "no such key"})

    return lookup


def _seed_task(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed} drift {number}")


async def _give_no_reward(_messages: Sequence[Message]) -> float:
    return 0.0
