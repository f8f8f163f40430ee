"""Train on a data set of prompts with reward functions from a Python file. TOML recipes are for this recipe.

model = "Qwen/Qwen2.5-0.5B-Instruct"
output = "runs/sums"
loop.num_steps = 100
data.file = "prompts.jsonl"                # rows like {"prompt": "3 + 4?", "answer": "7"}

[[rewards]]
function = "rewards.py:correct"            # def correct(completions, answer): return [...]
"""

from __future__ import annotations

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
from unbroken.runs.prompts.dataset import DataConfig, Rows
from unbroken.runs.prompts.rewards import Problem, RewardConfig, Rewards
from unbroken.runs.python_files import load_object
from unbroken.runs.reinforce import reinforce


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """A data set, reward functions, and optionally tools."""

    output: Path = Path("runs/prompts")
    model: str
    """The model's folder or its name on the hub."""
    data: DataConfig
    evaluation_data: DataConfig | None = None
    """The data of the evaluation; if left out, `data`."""
    rewards: tuple[RewardConfig, ...]
    """At least one."""
    tools: tuple[Path, ...] = ()
    """Tools that the model may call, each written file.py:name; the function needs the decorator `@tool`."""


async def run(config: Config) -> None:
    """Load the rows, reward functions and tools, and train."""
    rows = Rows(config.data, seed=config.seed)
    evaluation_rows = rows if config.evaluation_data is None else Rows(config.evaluation_data, seed=config.seed)
    tools = [load_tool(reference) for reference in config.tools]
    await reinforce(
        config,
        model=config.model,
        train_on=make_problems(rows, Rewards(config.rewards, rows.columns), tools),
        evaluate_on=make_problems(evaluation_rows, Rewards(config.rewards, evaluation_rows.columns), tools),
    )


def make_problems(rows: Rows, rewards: Rewards, tools: list[Tool]) -> Problems:
    """Each row as a problem with the tools that it names (or all); raises `InvalidInputError` for an unknown tool."""
    by_name = {tool.name: tool for tool in tools}
    rows.check_tools(by_name)

    def env(number: int) -> ToolEnv:
        names = rows.tools(number)
        return ToolEnv(rows.messages(number), tools if names is None else [by_name[name] for name in names], _no_reward)

    async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        problem = Problem(
            place=f"row {rows.index(number)} of {rows.name}",
            prompt=rows.prompt(number),
            num_prompt_messages=len(rows.messages(number)),
            row=rows.row(number),
        )
        return await rewards.score(problem, group)

    return Problems(env=env, score=score, source=rows.source)


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
