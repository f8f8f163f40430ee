"""A recipe whose rollouts end in all ways: the problem's number says how its environment answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.letters_recipe import share_of_letters
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.tools import tool
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig, RunConfig
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig
from unbroken.types import SamplingParams

ENDINGS = ("turns", "raises", "rewrites", "replaces", "example", "inserts", "slow")
END = 583
"""The id that ends a turn of the tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """A problem for each ending."""

    output: Path
    model: Path
    """A folder."""
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            problems_per_step=len(ENDINGS),
            group_size=4,
            sampling=SamplingParams(max_tokens=8, logit_bias=((END, 4.0),)),
            limits=Limits(max_turns=4, max_tokens=17, timeout_s=1.0),
        )
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=1))


@tool
async def look() -> str:
    """Look."""
    return "a cat"


class Endings:
    """An episode that ends in the way of its name."""

    def __init__(self, ending: str, number: int) -> None:
        self.ending, self.number, self.num_turns = ending, number, 0

    async def start(self) -> EnvStart:
        """Ask; with an example of an answer that is equal to no reply."""
        messages: list[Any] = [{"role": "user", "content": f"Write {self.number}."}]
        if self.ending == "example":
            messages = [*messages, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "Another."}]
        return EnvStart(messages=messages, tools=(look.schema,))

    async def step(self, reply: Reply) -> Outcome:
        """Answer in the way of the ending."""
        self.num_turns += 1
        again = {"role": "user", "content": f"Again, {self.num_turns}."}
        if self.ending == "raises" and self.num_turns == 2:
            raise ValueError("the world is gone")
        if self.ending == "slow" and self.num_turns == 2:
            await asyncio.sleep(60)
        if self.ending in ("example", "inserts", "rewrites") and self.num_turns == 2:
            return Done()
        if self.ending == "inserts":
            return Continue(messages=[{"role": "assistant", "content": "I see."}, again])
        if self.ending == "rewrites" or (self.ending == "replaces" and self.num_turns == 3):
            return Rewrite(messages=[{"role": "user", "content": f"All anew, {self.number}."}])
        return Continue(messages=[again])

    async def reward(self, messages: Any) -> float:
        """The share of letters in the last message."""
        return share_of_letters(messages)

    async def close(self) -> None:
        """Nothing is open."""


async def make_task(config: Config) -> Task:
    """A problem for each ending."""

    def env(number: int) -> Endings:
        return Endings(ENDINGS[number % len(ENDINGS)], number)

    return Task(model=config.model, train_on=Problems(env=env), evaluate_on=Problems(env=env))
