"""A recipe of two turns with a tool, for a random model: the environment answers its first turn, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from support.letters_recipe import share_of_letters
from unbroken.rollout.env import Continue, Done, Outcome, Reply
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig, RunConfig
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig
from unbroken.types import SamplingParams

BAD_WORDS = ((7,), (8, 9), *((number, number) for number in range(120)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """Two prompts a step, four completions each, and words that are never sampled."""

    output: Path
    model: Path
    """A folder."""
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            problems_per_step=2,
            group_size=4,
            sampling=SamplingParams(max_tokens=12, bad_words_ids=BAD_WORDS),
            limits=Limits(max_turns=2),
        )
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=2))


@tool
async def look() -> str:
    """Look."""
    return "a cat"


class TwoTurns(ToolEnv):
    """Answers the first turn, and ends with the second."""

    num_turns = 0

    async def step(self, reply: Reply) -> Outcome:
        """Answer a turn, whatever it is."""
        self.num_turns += 1
        return Done() if self.num_turns == 2 else Continue(messages=[{"role": "user", "content": "Again."}])


async def make_task(config: Config) -> Task:
    """Prompts of two turns."""

    def env(number: int) -> TwoTurns:
        return TwoTurns([{"role": "user", "content": f"Write {number}."}], [look], share_of_letters)

    return Task(model=config.model, train_on=Problems(env=env), evaluate_on=Problems(env=env))
