"""Train on your own environment: guess a number, with a tool in every second problem.

    unbroken train recipes/guess.py --model MODEL

The environment answers each guess, ends the episode when the number is found, and gives a higher reward for fewer
guesses. In every second problem, the model may ask a tool whether the number is even.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.messages import Message, get_text
from unbroken.rollout.env import Continue, Done, Outcome, Reply
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, tool
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig, RunConfig
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig
from unbroken.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """The settings: a model, and the largest number."""

    output: Path = Path("runs/guess")
    model: str
    """The model's folder or its name on the hub."""
    largest: int = 20
    """Numbers are drawn from 1 to this number."""
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(sampling=SamplingParams(max_tokens=64), limits=Limits(max_turns=8))
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=100))


class GuessEnv(ToolEnv):
    """One number to guess. `ToolEnv` answers tool calls; `step` answers guesses."""

    def __init__(self, number: int, largest: int, *, with_hint: bool) -> None:
        """Make an episode for `number`, which the model does not see."""
        prompt = f"Guess my number from 1 to {largest}. Write the number alone; I say whether mine is higher or lower."
        super().__init__(
            [{"role": "user", "content": prompt}], [parity_tool(number)] if with_hint else [], self.compute_reward
        )
        self._number = number
        self._num_guesses = 0
        self._found = False

    async def step(self, reply: Reply) -> Outcome:
        """Answer tool calls by their tools, and a guess by a message."""
        if reply.finish_reason is FinishReason.LENGTH or reply.parsed.tool_calls:
            return await super().step(reply)
        self._num_guesses += 1
        guess = re.search(r"\d+", get_text(reply.message["content"]))
        if guess is None:
            return Continue(messages=[{"role": "user", "content": "That is not a number."}])
        if int(guess[0]) == self._number:
            self._found = True
            return Done()
        word = "higher" if self._number > int(guess[0]) else "lower"
        return Continue(messages=[{"role": "user", "content": f"Mine is {word}."}])

    async def compute_reward(self, messages: Sequence[Message]) -> float:
        """1 if the first guess is right, 1/2 for the second, and so on; 0 if the number was not found."""
        return 1 / self._num_guesses if self._found else 0.0


def parity_tool(number: int) -> Tool:
    """A tool that says whether `number` is even."""

    @tool
    async def is_even() -> bool:
        """Whether the number is even."""
        return number % 2 == 0

    return is_even


def make_env(number: int, split: str, seed: int, largest: int = 20) -> GuessEnv:
    """Make problem `number` of a split: the same number to guess in each rollout, with a tool if it is odd.

    It is an environment by name too: `environment = "guess.py:make_env"` in a TOML file.
    """
    secret = random.Random(f"{seed} {split} {number}").randint(1, largest)
    return GuessEnv(secret, largest, with_hint=number % 2 == 1)


async def make_task(config: Config) -> Task:
    """Random numbers to guess."""

    def numbers(split: str) -> Problems:
        return Problems(env=lambda number: make_env(number, split, config.seed, config.largest))

    return Task(model=config.model, train_on=numbers("train"), evaluate_on=numbers("evaluation"))
