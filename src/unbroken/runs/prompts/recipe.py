"""Train on a data set of prompts with reward functions from a Python file. TOML recipes are for this recipe.

model = "Qwen/Qwen2.5-0.5B-Instruct"
output = "runs/sums"
loop.num_steps = 100
data.file = "prompts.jsonl"                # rows like {"prompt": "3 + 4?", "answer": "7"}

[[rewards]]
function = "rewards.py:correct"            # def correct(completions, answer): return [...]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.messages import Message
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Problems
from unbroken.runs.config import RunConfig
from unbroken.runs.evaluation.evaluator import EvaluationSet
from unbroken.runs.prompts.dataset import DataConfig, Rows
from unbroken.runs.prompts.rewards import Problem, RewardConfig, Rewards
from unbroken.runs.python_files import load_object
from unbroken.runs.reinforce import reinforce
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """A named data set to evaluate on."""

    name: str
    data: DataConfig
    num_problems: int | None = None
    """Problems, from the first on in the order of the run; none: all rows."""
    num_samples: int | None = None
    """Rollouts of each problem; none: `evaluation.num_samples`."""
    sampling: SamplingParams | None = None
    """If left out, `evaluation.sampling`, and without it that of the rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """A data set, reward functions, and optionally tools."""

    output: Path = Path("runs/prompts")
    model: str
    """The model's folder or its name on the hub."""
    data: DataConfig
    evaluation_data: DataConfig | None = None
    """The data of the evaluation; if left out, `data`."""
    evaluation_sets: tuple[EvaluationData, ...] = ()
    """Instead, several named data sets, each with its own number of problems, samples and sampling parameters."""
    rewards: tuple[RewardConfig, ...]
    """At least one."""
    tools: tuple[Path, ...] = ()
    """Tools that the model may call, each written file.py:name; the function needs the decorator `@tool`."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.evaluation_sets and self.evaluation_data is not None:
            raise InvalidInputError(
                "evaluation_data must be left out with evaluation_sets, which have data of their own"
            )


async def run(config: Config) -> None:
    """Load the rows, reward functions and tools, and train."""
    rows = Rows(config.data, seed=config.seed)
    tools = [load_tool(reference) for reference in config.tools]
    await reinforce(
        config,
        model=config.model,
        train_on=make_problems(rows, Rewards(config.rewards, rows.columns), tools),
        evaluate_on=make_sets(config, rows, tools),
    )


def make_sets(config: Config, rows: Rows, tools: list[Tool]) -> list[EvaluationSet]:
    """The data sets to evaluate on; raises as `Rows` and `make_problems` do."""
    if not config.evaluation_sets:
        alone = rows if config.evaluation_data is None else Rows(config.evaluation_data, seed=config.seed)
        return [EvaluationSet(problems=make_problems(alone, Rewards(config.rewards, alone.columns), tools))]
    loaded = [Rows(each.data, seed=config.seed) for each in config.evaluation_sets]
    return [
        EvaluationSet(
            name=each.name,
            problems=make_problems(of_set, Rewards(config.rewards, of_set.columns), tools),
            num_problems=len(of_set) if each.num_problems is None else each.num_problems,
            num_samples=each.num_samples,
            sampling=each.sampling,
        )
        for each, of_set in zip(config.evaluation_sets, loaded, strict=True)
    ]


def make_problems(rows: Rows, rewards: Rewards, tools: list[Tool]) -> Problems:
    """Each row as a problem with the tools that it names (or all); raises `InvalidInputError` for an unknown tool."""
    by_name = {tool.name: tool for tool in tools}
    rows.check_tools(by_name)

    def env(number: int) -> ToolEnv:
        names = rows.tools(number)
        return ToolEnv(rows.messages(number), tools if names is None else [by_name[name] for name in names], _no_reward)

    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        row = await asyncio.to_thread(rows.row, number)  # decodes images
        problem = Problem(
            place=f"row {rows.index(number)} of {rows.name}",
            prompt=row[rows.prompt_column],
            num_prompt_messages=len(rows.messages(number)),
            row=row,
        )
        return await rewards.score(problem, group)

    return Problems(env=env, score=score, source=rows.source, has_images=rows.has_images)


def load_tool(reference: Path) -> Tool:
    """Load the tool `file.py:name`; raises `InvalidInputError` if it is not a tool."""
    _, found = load_object(reference, field="tools")
    if not isinstance(found, Tool):
        raise InvalidInputError(
            f"tools must be functions with the decorator @tool, got {reference}, which is {found!r}"
        )
    return found


async def _no_reward(messages: Sequence[Message]) -> float:
    """The reward until `score` has the whole group."""
    return 0.0
