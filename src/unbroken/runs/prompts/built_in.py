"""Train on a data set of prompts with reward functions from a Python file. TOML recipes are for this recipe.

model = "Qwen/Qwen2.5-0.5B-Instruct"
output = "runs/sums"
loop.num_steps = 100
data.file = "prompts.jsonl"                # rows like {"prompt": "3 + 4?", "answer": "7"}

[[rewards]]
function = "rewards.py:correct"            # def correct(completions, answer): return [...]

Or on an environment, which computes its rewards, with or without a data set:

environment = "guess.py:make_env"          # file.py:Class or module:Class
environment_arguments = {largest = 20}

Or on an environment of another package, which brings rows, tools and rewards:

environment = "verifiers:NAME"             # or harbor:FOLDER, terminal tasks
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.messages import Message, ToolSchema, get_text
from unbroken.model_source import check_model_folder, check_model_source
from unbroken.rollout.agents.command import CommandAgent, CommandReward
from unbroken.rollout.agents.session import Agent, AgentTask
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.runs.algorithms import Algorithm
from unbroken.runs.collector import DEFAULT_SET, EvaluationSet, MakeEnv, Problems, Score
from unbroken.runs.config import RunConfig, is_address
from unbroken.runs.prompts.dataset import DataConfig, Rows
from unbroken.runs.prompts.environments import (
    AgentConfig,
    Environments,
    PackageProblems,
    PackageSettings,
    is_package,
    select_tools,
)
from unbroken.runs.prompts.rewards import Problem, RewardConfig, Rewards
from unbroken.runs.python_files import FunctionName, ModelName, load_object
from unbroken.runs.recipe import Task
from unbroken.runs.settings import Mistakes
from unbroken.training.objective.samples import keep_trainable
from unbroken.types import SamplingParams

TRAIN = "train"
"""The split to train on; every other one is the name of a set to evaluate on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationData:
    """A data set to evaluate on."""

    name: str = DEFAULT_SET
    """In metrics; must be given with several."""
    data: DataConfig
    num_problems: int | None = None
    """Problems, from the first on in the order of the run; none: all rows."""
    num_samples: int | None = None
    """Rollouts of each problem; none: `evaluation.num_samples`."""
    sampling: SamplingParams | None = None
    """If left out, `evaluation.sampling`, and without it that of the rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """A data set and reward functions, an environment, or an agent; and tools."""

    output: Path = Path("runs/prompts")
    model: ModelName
    """The model's folder or its name on the hub."""
    data: DataConfig | None = None
    """May be left out with an environment that makes its own problems."""
    evaluation_sets: tuple[_EvaluationData, ...] = ()
    """Data sets to evaluate on, each with a name and its own number of problems, samples and sampling parameters;
    without any, the first problems of `data`."""
    rewards: tuple[RewardConfig, ...] = ()
    """At least one without an environment; with one, their sum is added to its own reward."""
    tools: tuple[Path, ...] = ()
    """Tools that the model may call, each written file.py:name; the function needs the decorator `@tool`."""
    environment: FunctionName | None = None
    """Instead of one answer to each prompt, a class with the methods of `Env`, written file.py:Class or module:Class.
    It gets the arguments that it names: those of `environment_arguments`, columns of the row, and number, split, seed,
    messages and tools. Or, with their own rows, verifiers:NAME, an environment of the package verifiers, and
    harbor:FOLDER, a folder of terminal tasks."""
    environment_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's class, or of another package's environment, e.g. {largest = 20}."""
    agent: AgentConfig | None = None
    """Instead of answers and environments: a program that attempts each row, as it would with any model."""

    def __post_init__(self) -> None:
        if is_package(self.environment):
            self._check_package()
        elif self.agent is not None:
            self._check_agent()
        elif self.environment is None:
            if self.data is None:
                raise InvalidInputError("data must be given without an environment: data.file or data.hub")
            if not self.rewards and self.algorithm is not Algorithm.DISTILLATION:
                raise InvalidInputError(
                    "rewards must hold at least one function or model without an environment: [[rewards]] function = "
                    '"rewards.py:name" in the recipe, or --reward rewards.py:name of `unbroken eval`; algorithm '
                    "distillation needs none"
                )
            if self.environment_arguments:
                raise InvalidInputError(
                    f"environment_arguments must be left out without an environment, got "
                    f"{dict(self.environment_arguments)}"
                )
        elif self.rewards and self.data is None:
            raise InvalidInputError(
                "rewards must be left out without data, whose rows their functions score: the environment has a reward"
            )
        self._check_reward_parts()
        self._check_teacher_sources()
        self._check_files()
        RunConfig.__post_init__(self)  # last, because it loads torch for the objective

    @property
    def max_turns(self) -> int:
        """See `RunConfig`: an answer without tools is one turn."""
        return self.rollouts.limits.max_turns if self.tools or self.environment or self.agent else 1

    def _check_reward_parts(self) -> None:
        if self.advantages == "gdpo" and not self.rewards:
            raise InvalidInputError(
                "rewards must hold functions with advantages gdpo, which normalises each apart: the parts of an "
                "environment's reward have no weights"
            )

    def _check_files(self) -> None:
        """Raise `InvalidInputError` for files and folders that are not there."""
        mistakes = Mistakes()
        with mistakes.collect():
            check_model_folder(self.model)
        named: dict[str, Path | str | None] = {name: getattr(self, name) for name in ("environment", "loss")}
        named |= {"advantages": self.advantages, "curriculum": self.curriculum}
        named |= {"agent.function": self.agent.function} if self.agent else {}
        named |= {f"rewards[{k}].function": each.function for k, each in enumerate(self.rewards)}
        named |= {f"tools[{k}]": each for k, each in enumerate(self.tools)}
        for name, value in named.items():
            with mistakes.collect():
                FunctionName(value or "").check_file(name=name)
        data = {"data": self.data}
        data |= {f"evaluation_sets[{k}].data": each.data for k, each in enumerate(self.evaluation_sets)}
        for name, each in data.items():
            for path in () if each is None else each.files:
                if not path.exists():
                    mistakes.add(f"{name}.file must name a file that exists, got {path}: there is no such file")
        mistakes.raise_all()

    def _check_teacher_sources(self) -> None:
        """Raise `InvalidInputError` for a teacher that is not there, or whose prompt lacks what the policy's has."""
        if self.teacher is None:
            return
        for model in self.teacher.models:
            if not is_address(model):
                check_model_folder(model, name="teacher.models")
        if (column := self.teacher.prompt) is None:
            return
        if self.data is None:
            raise InvalidInputError(f"data.file must be given with teacher.prompt {column!r}, a column of it, got none")
        if self.data.system is not None:
            raise InvalidInputError(
                f"data.system must be left out with teacher.prompt {column!r}, which would not have it: write messages"
            )

    def _check_package(self) -> None:
        for name in ("data", "evaluation_sets", "tools", "rewards", "agent"):
            if getattr(self, name):
                raise InvalidInputError(f"{name} must be left out with {self.environment!s}, which has its own")

    def _check_agent(self) -> None:
        if self.data is None:
            raise InvalidInputError("data must be given with an agent, which attempts its rows: data.file or data.hub")
        for name in ("environment", "tools"):
            if getattr(self, name):
                raise InvalidInputError(f"{name} must be left out with an agent, which has its own")
        agent = self.agent
        assert agent is not None
        if agent.function or agent.check or agent.reward is not CommandReward.NONE or self.rewards:
            return
        if agent.name is not None:
            raise InvalidInputError("agent.check must be given with a name and no rewards: nothing would score it")
        raise InvalidInputError(
            'agent.reward must be "exit" or "output" with a command, no check and no rewards: nothing would score it'
        )


async def make_task(config: Config) -> Task:
    """Load the rows, reward functions, tools and environment."""
    maker = ProblemMaker(config)
    train_on, sets = maker.make(config.data, split=TRAIN), _make_sets(config, maker)
    if config.model_settings.revision is None:  # another revision may be in the hub's cache alone
        check_model_source(config.model)
    return Task(model=config.model, train_on=train_on, evaluate_on=sets)


def _make_sets(config: Config, maker: ProblemMaker) -> list[EvaluationSet]:
    """The sets to evaluate on; raises as `ProblemMaker.make` does."""
    if not config.evaluation_sets:
        return [EvaluationSet(problems=maker.make(config.data, split=DEFAULT_SET))]
    made = [maker.make(each.data, split=each.name) for each in config.evaluation_sets]
    return [
        EvaluationSet(
            name=each.name,
            problems=problems,
            num_problems=len(maker.load(each.data)) if each.num_problems is None else each.num_problems,
            num_samples=each.num_samples,
            sampling=each.sampling,
        )
        for each, problems in zip(config.evaluation_sets, made, strict=True)
    ]


class ProblemMaker:
    """Makes problems of data sets, with the tools, rewards and environment of a config."""

    def __init__(self, config: Config) -> None:
        """Load the tools and the environment or agent; raises `InvalidInputError` for one that cannot be used."""
        self._config = config
        self._tools = [load_tool(reference) for reference in config.tools]
        self._environments = None
        self._package, self._agent = None, None
        if is_package(config.environment):
            settings = PackageSettings(
                arguments=config.environment_arguments, logs=config.output / "agents", limits=config.rollouts.limits
            )
            self._package = PackageProblems(str(config.environment), settings, seed=config.seed)
        elif config.environment is not None:
            self._environments = Environments(config.environment, config.environment_arguments, seed=config.seed)
        elif config.agent is not None:
            self._agent = config.agent.load(output=config.output, limits=config.rollouts.limits)
        self._loaded: dict[DataConfig, Rows] = {}

    def load(self, data: DataConfig) -> Rows:
        """Load the rows of a data set, once; raises as `Rows` does, and for the name of an unknown tool."""
        if data not in self._loaded:
            rows = Rows(data, seed=self._config.seed)
            rows.check_tools([tool.name for tool in self._tools])
            self._loaded[data] = rows
        return self._loaded[data]

    def make(self, data: DataConfig | None, *, split: str) -> Problems:
        """Each row as a problem, or the problems of the environment alone.

        Raises:
            InvalidInputError: the data, a reward function or the environment cannot be used with the others.
            MessagesError, ImageError: a row cannot be used.
        """
        if self._package is not None:
            return self._package.make(evaluation=split != TRAIN)
        rows = None if data is None else self.load(data)
        if rows is not None and split == TRAIN:
            self._check_teacher_columns(rows)
        if self._agent is not None and rows is not None:
            return self._make_agent_problems(self._agent, rows)
        if self._environments is None:
            assert rows is not None, "Config asks for data without an environment"
            make_env = self._make_tool_env(rows)
        else:
            make_env = self._environments(rows, self._tools, split=split)
        if rows is None:
            return Problems(env=make_env, tools=[tool.schema for tool in self._tools])
        return Problems(
            env=make_env,
            score=self._choose_score(rows),
            row=rows.describe,
            source=rows.source,
            num_problems=len(rows),
            has_images=rows.has_images,
            first_messages=None if self._environments else partial(self._find_first_messages, rows),
            tools=[tool.schema for tool in self._tools],
            check_prompts=None if self._environments else partial(rows.check_prompts, self._tools),
        )

    def _check_teacher_columns(self, rows: Rows) -> None:
        teacher = self._config.teacher
        named = {} if teacher is None else {"column": teacher.column, "prompt": teacher.prompt}
        for setting, name in named.items():
            if name is not None and name not in rows.columns:
                raise InvalidInputError(
                    f"{rows.name} must have the column {name!r}, which teacher.{setting} names: its columns are "
                    f"{', '.join(rows.columns)}"
                )

    def _make_agent_problems(self, agent: Agent, rows: Rows) -> Problems:
        def prepare(number: int) -> Agent:
            """An agent that is known by its name gets the prompt's text; all others read the row themselves."""
            if not isinstance(agent, CommandAgent) or agent.known is None:
                return agent
            place = f"row {rows.index(number)} of {rows.name}"
            return replace(agent, instruction=_read_instruction(rows.messages(number), place=place))

        def task(number: int) -> AgentTask:
            return AgentTask(agent=prepare(number), task=rows.row(number))

        for number in range(len(rows)):
            prepare(number)  # so that a prompt that is no task is refused before anything is sampled
        score = self._make_score(rows) if self._config.rewards else None
        return Problems(
            agent=task,
            score=score,
            row=rows.describe,
            source=rows.source,
            num_problems=len(rows),
            has_images=rows.has_images,
        )

    def _find_first_messages(self, rows: Rows, number: int) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
        tools = select_tools(self._tools, rows.tools(number))
        return rows.messages(number), [tool.schema for tool in tools]

    def _make_tool_env(self, rows: Rows) -> MakeEnv:
        def env(number: int) -> ToolEnv:
            return ToolEnv(rows.messages(number), select_tools(self._tools, rows.tools(number)), _no_reward)

        return env

    def _choose_score(self, rows: Rows) -> Score | None:
        if self._config.rewards:
            return self._make_score(rows)
        return None if self._environments else _leave_unscored

    def _make_score(self, rows: Rows) -> Score:
        rewards = Rewards(
            self._config.rewards, rows.columns, add_to_own=self._environments is not None or self._agent is not None
        )

        async def score(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
            row = await asyncio.to_thread(rows.row, number)  # decodes images
            problem = Problem(
                place=f"row {rows.index(number)} of {rows.name}",
                prompt=row[rows.prompt_column],
                num_prompt_messages=len(rows.messages(number)) if self._agent is None else None,
                row=row,
            )
            return await rewards.score(problem, group)

        return score


def load_tool(reference: Path) -> Tool:
    """Load the tool `file.py:name`; raises `InvalidInputError` if it is not a tool."""
    _, found = load_object(reference, field="tools")
    if not isinstance(found, Tool):
        raise InvalidInputError(
            f"tools must be functions with the decorator @tool, got {reference}, which is a {type(found).__name__} "
            "without it: write @tool above it, of `from unbroken import tool`"
        )
    return found


async def _leave_unscored(number: int, group: TrajectoryGroup) -> TrajectoryGroup:
    """The group of a teacher alone, whose answers have no reward, instead of one of 0."""
    answers = {each.trajectory_id for each in keep_trainable(group)}
    members = (
        replace(each, reward=None, status=TrajectoryStatus.UNSCORED) if each.trajectory_id in answers else each
        for each in group.trajectories
    )
    return replace(group, trajectories=tuple(members))


async def _no_reward(messages: Sequence[Message]) -> float:
    """The reward until `score` has the whole group."""
    return 0.0


def _read_instruction(messages: Sequence[Message], *, place: str) -> str:
    """The text of a prompt for an agent, which has its own system prompt; an error begins with `place`.

    Raises:
        InvalidInputError: the prompt is anything but one message of the user, of text.
    """
    roles = [message["role"] for message in messages]
    content = messages[0].get("content")
    parts = {part["type"] for part in content} if isinstance(content, list) else {"text"}
    if roles != ["user"] or parts != {"text"}:
        raise InvalidInputError(
            f"{place} must be one message of the user, of text, for an agent.name, which has a system prompt of its "
            f"own: got messages of {', '.join(roles)}, the first with {', '.join(sorted(parts))}"
        )
    return get_text(content)
