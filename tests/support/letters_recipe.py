"""A recipe that a random model can learn: the reward is the share of letters in its text."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.rollout.env import EnvStart
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig, RunConfig
from unbroken.runs.recipe import Task
from unbroken.threads import run_in_daemon_thread
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """Two prompts a step, eight completions each."""

    output: Path
    model: Path
    """A folder."""
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            problems_per_step=2, sampling=SamplingParams(max_tokens=24), limits=Limits(max_turns=1)
        )
    )
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(optimizer=OptimizerConfig(learning_rate=3e-3)))
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=12))


async def make_task(config: Config) -> Task:
    """The letters."""

    held = config.output.with_name(f"{config.output.name}.held")

    def env(number: int) -> ToolEnv:
        return ToolEnv([{"role": "user", "content": f"Write {number}."}], [], share_of_letters)

    def train_env(number: int) -> ToolEnv:
        return _wait_before_start(env(number), number // config.rollouts.problems_per_step, held)

    return Task(model=config.model, train_on=Problems(env=train_env), evaluate_on=Problems(env=env))


def _wait_before_start(env: ToolEnv, step: int, held: Path) -> ToolEnv:
    """Have a problem of the step that stands in a file, or of a later one, wait while the file is there."""
    start = env.start

    def wait() -> None:
        with suppress(FileNotFoundError):
            while step >= int(held.read_text()):
                time.sleep(0.05)

    async def wait_and_start() -> EnvStart:
        await run_in_daemon_thread(wait)
        return await start()

    env.start = wait_and_start  # type: ignore[method-assign]
    return env


def share_of_letters(messages) -> float:
    """The reward; a random model gets more than 0 and less than 1."""
    text = messages[-1]["content"] or " "
    return sum(map(str.isalpha, text)) / len(text)
