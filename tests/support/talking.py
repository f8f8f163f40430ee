"""An environment of two policies that talk in turns about letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unbroken.messages import get_text
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply


class Talk:
    """The first speaks, the second (on odd numbers a frozen copy of it) answers, and the first ends: letters count."""

    def __init__(self, number: int, split: str) -> None:
        self._number, self._said = number, [""]
        self._other = "second@past" if number % 2 else "second"

    async def start(self) -> EnvStart:
        """The first speaks first."""
        return EnvStart(messages=[{"role": "user", "content": f"Write {self._number}."}], policy="first")

    async def step(self, reply: Reply) -> Outcome:
        """Let the other one speak."""
        self._said.append(get_text(reply.message["content"]))
        if len(self._said) == 4:
            return Done()
        messages = [{"role": "user", "content": f"Turn {len(self._said)}"}]
        return Continue(messages=messages, policy=self._other if len(self._said) == 2 else "first")

    async def reward(self, messages: Sequence[Any]) -> Mapping[str, float]:
        """The share of letters in what each said."""
        shares = [sum(map(str.isalpha, said)) / max(len(said), 1) for said in self._said]
        return {"first": shares[1] + shares[3], **({} if "@" in self._other else {"second": shares[2]})}

    async def close(self) -> None:
        """Nothing is open."""
