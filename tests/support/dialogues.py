"""Conversations whose user speaks as a test says, with a tool that looks things up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unbroken.messages import Message
from unbroken.rollout.env import Continue, Done, Outcome, Reply
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, tool


class Dialogue(ToolEnv):
    """Answers calls of the tool `lookup` and, after an answer without calls, asks the next of `follow_ups`."""

    def __init__(
        self, messages: Sequence[Message], results: Mapping[str, Any] | None = None, follow_ups: Sequence[str] = ()
    ) -> None:
        super().__init__(messages, [] if results is None else [_make_lookup(results)], _give_no_reward)
        self._follow_ups = list(follow_ups)

    async def step(self, reply: Reply) -> Outcome:
        outcome = await super().step(reply)
        if isinstance(outcome, Done) and self._follow_ups:
            return Continue(messages=[{"role": "user", "content": self._follow_ups.pop(0)}])
        return outcome


def _make_lookup(results: Mapping[str, Any]) -> Tool:
    @tool
    async def lookup(key: str) -> Any:
        """Look up a key.

        Args:
            key: The key.
        """
        return results.get(key, {"error": "no such key"})

    return lookup


async def _give_no_reward(_messages: Sequence[Message]) -> float:
    return 0.0
