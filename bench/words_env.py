"""The environment of bench/grpo.py and bench/overlap.py: turns with a call of a tool between two, whatever is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema

from grpo_task import find_number, prompt_of
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply


class Words:
    """The turns of a problem; the reward is the share of words that begin with an a."""

    def __init__(
        self,
        number: int,
        *,
        num_turns: int,
        draw_tool_s: Callable[[], float],
        draw_answer: Callable[[int], str] = lambda turn: find_number("a"),
    ) -> None:
        """`draw_tool_s` says how many seconds the next call of the tool takes, `draw_answer` what it answers."""
        self._number = number
        self._num_turns_left = num_turns
        self._num_calls = 0
        self._draw_tool_s = draw_tool_s
        self._draw_answer = draw_answer

    async def start(self) -> EnvStart:
        """See `Env`."""
        tools = (get_json_schema(find_number),) if self._num_turns_left > 1 else ()
        return EnvStart(messages=[{**message} for message in prompt_of(self._number)], tools=tools)  # type: ignore[typeddict-item]

    async def step(self, reply: Reply) -> Outcome:
        """See `Env`."""
        self._num_turns_left -= 1
        if self._num_turns_left == 0:
            return Done()
        await asyncio.sleep(self._draw_tool_s())
        answer = self._draw_answer(self._num_calls)
        self._num_calls += 1
        return Continue(messages=[{"role": "tool", "name": "find_number", "content": answer}])

    async def reward(self, messages: Sequence[Any]) -> float:
        """See `Env`."""
        text = "".join(message["content"] for message in messages if message["role"] == "assistant")
        good, bad = text.count("a"), text.count("b")
        return good / max(1, good + bad)

    async def close(self) -> None:
        """See `Env`."""
