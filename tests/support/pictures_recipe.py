"""A recipe whose environment answers with a picture, as a tool does; its first messages have none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from support.vision import picture
from unbroken.rollout.env import Continue, Done, Outcome, Reply
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import to_content
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig, RunConfig
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """Two problems a step, two turns each."""

    output: Path
    model: Path
    """A folder."""
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            problems_per_step=2, group_size=2, sampling=SamplingParams(max_tokens=6), limits=Limits(max_turns=2)
        )
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=2))


class PictureEnv(ToolEnv):
    """Shows a picture after the first reply."""

    def __init__(self, number: int) -> None:
        """Make an episode with picture `number`."""
        super().__init__([{"role": "user", "content": f"Ask for {number}."}], [], share_of_letters)
        self._number = number
        self._num_replies = 0

    async def step(self, reply: Reply) -> Outcome:
        """Answer the first reply."""
        self._num_replies += 1
        if self._num_replies == 2:
            return Done()
        content = to_content(["This:", picture(28 * (1 + self._number % 3), 56, seed=self._number)])
        return Continue(messages=[{"role": "user", "content": content}])


def share_of_letters(messages) -> float:
    """The reward; a random model gets more than 0 and less than 1."""
    text = messages[-1]["content"] or " "
    return sum(map(str.isalpha, text)) / len(text)


async def make_task(config: Config) -> Task:
    """The pictures."""
    problems = Problems(env=PictureEnv)
    return Task(model=config.model, train_on=problems, evaluate_on=problems)
