"""What attempts the rows of a TOML file: a class of environments, those of another package, or an agent.

environment = "sums.py:Sum"                    # class Sum: def __init__(self, number, *, largest, seed): ...
environment_arguments = {largest = 20}

A class gets the arguments that it names: those of the table, the columns of the row, and `OWN_ARGUMENTS`. All of them
are checked before anything is sampled.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from unbroken.errors import InvalidInputError
from unbroken.rollout.agents.command import Check, CommandAgent, CommandReward, Workspace, check_program
from unbroken.rollout.agents.container import Image
from unbroken.rollout.agents.known import KNOWN_AGENTS
from unbroken.rollout.agents.session import Agent, AgentTask, TaskEnvironment
from unbroken.rollout.env import Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.seeds import EpochOrder
from unbroken.rollout.tools import Tool
from unbroken.runs.collector import Problems
from unbroken.runs.prompts.dataset import Rows, describe_row
from unbroken.runs.python_files import CommandWord, FunctionName, load_function
from unbroken.runs.settings import build, check_toml, read_table, section_of

OWN_ARGUMENTS = ("number", "split", "seed", "messages", "tools")
"""The problem's number, 0, 1, 2, ... without end; `train`, or the name of the evaluation's set; the run's seed; the
prompt of the row, as messages; the tools that it may use."""
_NEED_ROWS = ("messages",)
_FIELD, _TABLE = "environment", "environment_arguments"


class Environments:
    """Makes the environments of one class."""

    def __init__(self, reference: FunctionName, arguments: Mapping[str, Any], *, seed: int) -> None:
        """Load the class `module:Class` or `file.py:Class`, and check the table of its arguments.

        Raises:
            InvalidInputError: there is no such class, it lacks a method of `Env`, or the table has an argument that it
                does not take or one of another type.
        """
        if not reference.is_reference:
            raise InvalidInputError(f"{_FIELD} must be written module:Class or file.py:Class, got {str(reference)!r}")
        self._name = reference.rpartition(":")[2]
        self._make: Callable[..., Any] = load_function(reference, field=_FIELD)
        if isinstance(self._make, type):
            missing = [name for name in ("start", "step", "reward", "close") if not hasattr(self._make, name)]
            if missing:
                raise InvalidInputError(
                    f"{_FIELD} must name a class with the methods of Env, got {self._name}, which has no "
                    f"{', '.join(missing)}"
                )
        parameters = inspect.signature(self._make).parameters
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._parameters = {
            name: each
            for name, each in parameters.items()
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        self._arguments = self._check(arguments)
        self._seed = seed

    def __call__(self, rows: Rows | None, tools: Sequence[Tool], *, split: str) -> Callable[[int], Env]:
        """A function from a problem's number to its environment; `rows` are the data set, `tools` all that there are.

        Raises:
            InvalidInputError: the class needs an argument that nobody gives, does not take the tools or the rows, or
                the table has the name of a column.
        """
        columns = () if rows is None else rows.columns
        self._check_sources(columns, has_rows=rows is not None, has_tools=bool(tools))
        needs_row = self._takes_any or any(name in self._parameters for name in columns)

        def make(number: int) -> Env:
            names = None if rows is None else rows.tools(number)
            own = {"number": number, "split": split, "seed": self._seed, "tools": select_tools(tools, names)}
            if rows is not None:
                own["messages"] = rows.messages(number)
            row = dict(rows.row(number)) if rows is not None and needs_row else {}
            given = {name: value for name, value in (row | own).items() if self._takes(name)}
            env: Env = self._make(**given, **self._arguments)
            return env

        return make

    def _takes(self, name: str) -> bool:
        return name in self._parameters or self._takes_any

    def _check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the table, each converted to the type that the class gives it."""
        known = [name for name in self._parameters if name not in OWN_ARGUMENTS]
        hints = _read_hints(self._make)
        checked = {}
        for name, value in arguments.items():
            if name in OWN_ARGUMENTS:
                raise InvalidInputError(f"{_TABLE}.{name} must be left out: the run gives it, got {value!r}")
            if not self._takes(name):
                raise InvalidInputError(
                    f"{_TABLE}.{name} must be an argument of {self._name}: it takes {', '.join(known) or 'none'}"
                )
            checked[name] = check_toml(hints[name], value, name=f"{_TABLE}.{name}") if name in hints else value
        return checked

    def _check_sources(self, columns: Sequence[str], *, has_rows: bool, has_tools: bool) -> None:
        if twice := sorted({*columns} & {*self._arguments}):
            raise InvalidInputError(
                f"{_TABLE}.{twice[0]} must be left out: the data set has a column of this name, got "
                f"{self._arguments[twice[0]]!r}"
            )
        own = [name for name in OWN_ARGUMENTS if has_rows or name not in _NEED_ROWS]
        for name, each in self._parameters.items():
            if each.default is each.empty and name not in {*own, *columns, *self._arguments}:
                where = f"the columns {', '.join(columns)}" if has_rows else "no data set"
                raise InvalidInputError(
                    f"{_TABLE}.{name} must be given: {self._name} needs it, and there is {where} (an environment also "
                    f"gets {', '.join(own)})"
                )
        if has_tools and not self._takes("tools"):
            raise InvalidInputError(f"tools must be left out with {self._name}, which takes no argument `tools`")
        if has_rows and not any(self._takes(name) for name in ("messages", *columns)):
            raise InvalidInputError(
                f"data must be left out with {self._name}, which takes neither messages nor a column: "
                f"{', '.join(columns)}"
            )


def select_tools(tools: Sequence[Tool], names: Sequence[str] | None) -> list[Tool]:
    """The tools of these names; all for None."""
    by_name = {tool.name: tool for tool in tools}
    return list(tools) if names is None else [by_name[name] for name in names]


def _read_hints(make: Callable[..., Any]) -> dict[str, Any]:
    """The types of the arguments, by name; none if they cannot be read."""
    try:
        parameters = inspect.signature(make, eval_str=True).parameters
    except (NameError, TypeError, AttributeError):
        return {}
    return {name: each.annotation for name, each in parameters.items() if each.annotation is not each.empty}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSettings:
    """What an environment of a package is made from, in addition to its name."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    logs: Path
    """Where the output of attempts is kept."""
    limits: Limits = field(default_factory=Limits)
    """Of the run's rollouts."""


class PackageProblems:
    """Makes the problems of an environment of a package."""

    def __init__(self, reference: str, settings: PackageSettings, *, seed: int) -> None:
        """Load the environment `PACKAGE:NAME`; raises `InvalidInputError` if that fails."""
        package, _, name = reference.partition(":")
        self._environment = PACKAGES[package](name, settings)
        self._seed = seed

    def make(self, *, evaluation: bool) -> Problems:
        """Its rows as problems: for training in another order each epoch, for evaluation in theirs."""
        rows = self._environment.rows(evaluation=evaluation)
        order = EpochOrder(len(rows), seed=self._seed, shuffle=not evaluation)

        def make_task(number: int) -> AgentTask:
            return rows.make_task(order.index(number))

        def describe(number: int) -> dict[str, Any]:
            return describe_row(order.index(number), make_task(number).task)

        return Problems(agent=make_task, row=describe, source=rows.source, num_problems=len(rows))


def is_package(reference: str | None) -> bool:
    """Whether this names an environment of a package, and no class of the user's."""
    name, colon, _ = (reference or "").partition(":")
    return bool(colon) and name in PACKAGES


def _load_verifiers(name: str, settings: PackageSettings) -> TaskEnvironment:
    from unbroken.integrations.verifiers import load_environment

    return load_environment(name, settings.arguments)


def _load_harbor(name: str, settings: PackageSettings) -> TaskEnvironment:
    from unbroken.integrations.harbor import ContainerRunner, TerminalConfig, TerminalTasks

    section = section_of(TerminalConfig, prefix="environment_arguments.")
    config: TerminalConfig = build(section, read_table(settings.arguments, section, source="", folder=None))
    runner = ContainerRunner(
        config.containers, trials=settings.logs, agent_timeout_s=config.agent_timeout_s, reward=config.reward
    )
    return TerminalTasks(Path(name), runner.read, config, max_attempt_s=settings.limits.timeout_s)


PACKAGES: dict[str, Callable[[str, PackageSettings], TaskEnvironment]] = {
    "verifiers": _load_verifiers,
    "harbor": _load_harbor,
}
"""Environments of other packages, by the words that their names begin with: `environment = "verifiers:NAME"`.

They bring rows and agents; each attempt is a session (docs/environments.md). To add a package, add a line.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """A program that attempts each row as it would with any model: it gets a URL and a key (docs/gateway.md)."""

    function: FunctionName | None = None
    """An async function that takes an `AgentSession`, whose `task` is the row, and returns a reward or None, written
    module:function or file.py:function."""
    command: tuple[CommandWord, ...] = ()
    """Instead of a function: words of a command, which is run for each attempt, with the session and the row in its
    environment (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, UNBROKEN_TASK, ...). It runs in its own folder; a word with a
    dot or a slash that names a file in the TOML file's folder stands for that file, or, if the file is in the
    workspace, for the copy's."""
    name: str | None = None
    """Instead of both: an agent that is known and installed, such as codex, claude-code or opencode. It gets the prompt
    as its task, and a fresh home with its configuration."""
    workspace: Path | None = None
    """For a command or a name: a folder, which is copied for each attempt and is the agent's working directory; none:
    an empty folder."""
    image: str | None = None
    """For a command or a name: an image of docker or podman, which has the programs. Command and check run in
    containers of it, as the user, with the working directory and a fresh home mounted and this machine's network."""
    check: tuple[CommandWord, ...] = ()
    """For a command or a name: words of a command, which is run in the agent's working directory after it. The reward
    is 1 if it exits with 0 within rollouts.limits.timeout_s, else 0. Its words are read as those of `command`."""
    reward: CommandReward = CommandReward.NONE
    """For a command. none: the reward comes from `check`, from `rewards`, or from `finish` of the session; exit: 1 if
    it exits with 0; output: the last line that it prints."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For a command or a name: further variables, also of the check."""
    inherit: tuple[str, ...] = ()
    """For a command or a name: names of variables of the trainer that it gets too, with PATH, HOME and the like; no
    other is passed on."""

    def __post_init__(self) -> None:
        if [self.function is None, not self.command, self.name is None].count(False) != 1:
            raise InvalidInputError(
                f"agent must have exactly one of function, command and name, got function={self.function}, "
                f"command={list(self.command)}, name={self.name}"
            )
        if self.function is not None:
            for name in ("workspace", "image", "check", "environment", "inherit"):
                if value := getattr(self, name):
                    raise InvalidInputError(f"{name} must be left out with agent.function, got {value!r}")
        if self.reward is not CommandReward.NONE and (self.check or not self.command):
            other = "check" if self.check else "function" if self.name is None else "name"
            raise InvalidInputError(f"reward must be left out with agent.{other}, got {self.reward.value!r}")
        if self.name is not None and self.name not in KNOWN_AGENTS:
            raise InvalidInputError(
                f"name must be one of {', '.join(KNOWN_AGENTS)}, got {self.name!r}: give another agent as agent.command"
            )

    def load(self, *, output: Path, limits: Limits) -> Agent:
        """Load the agent of a run with this output and these limits of rollouts.

        Raises:
            InvalidInputError: the function is not an async function, the agent is not installed, the check is no
                program, the workspace is no folder, or the image is not there.
        """
        if self.function is not None:
            found = load_function(self.function, field="agent.function")
            if not inspect.iscoroutinefunction(found):
                raise InvalidInputError(
                    f"agent.function must be an async function of an AgentSession, got {self.function!s}: {found!r}"
                )
            return cast(Agent, found)
        known = None if self.name is None else KNOWN_AGENTS[self.name]
        image = None if self.image is None else Image.find(self.image)
        if known is not None and image is None:
            known.check(str(self.name))
        workspace = None if self.workspace is None else Workspace(folder=self.workspace, leave_out=output)
        check = None
        if self.check:
            check = Check(command=self._place(self.check), timeout_s=limits.timeout_s)
            if image is None:
                check_program(check.command, field="agent.check", workspace=workspace)
        return CommandAgent(
            command=self._place(self.command),
            known=known,
            reward=self.reward,
            environment=self.environment,
            inherit=self.inherit,
            workspace=workspace,
            image=image,
            check=check,
            logs=output / "agents",
        )

    def _place(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words of a command that runs in a copy of the workspace: a path into the workspace means the copy's.

        The original's tests would otherwise be run, whatever the agent did.
        """
        if self.workspace is None:
            return tuple(words)
        folder = os.path.normpath(self.workspace.absolute())  # by the text alone, as words are: links stay
        paths = [Path(os.path.normpath(each)) for each in words]
        return tuple(
            f"./{path.relative_to(folder)}" if path.is_relative_to(folder) else each
            for path, each in zip(paths, words, strict=True)
        )
