"""Environments of other packages in a config: `environment = "verifiers:NAME"` or `"harbor:FOLDER"`.

They have rows of their own, each of which an agent attempts in a session (docs/environments.md). To add a package, add
its line to `PACKAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.errors import InvalidInputError
from unbroken.rollout.agents.command import CommandReward
from unbroken.rollout.agents.session import AgentTask
from unbroken.rollout.agents.tasks import TaskEnvironment
from unbroken.rollout.limits import Limits
from unbroken.rollout.order import EpochOrder
from unbroken.runs.collector import Problems
from unbroken.runs.prompts.agents import AgentConfig
from unbroken.runs.settings.build import build, read_table
from unbroken.runs.settings.fields import section_of

if TYPE_CHECKING:
    from unbroken.integrations.harbor.config import TerminalConfig
    from unbroken.integrations.harbor.runner import TaskRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSettings:
    """What an environment of a package is made from, beside its name."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    agent: AgentConfig | None = None
    """What attempts its rows, if it takes one."""
    logs: Path | None = None
    """Where the output of attempts is kept."""
    limits: Limits = field(default_factory=Limits)
    """Of the run's rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package whose environments are trained on."""

    load: Callable[[str, PackageSettings], TaskEnvironment]
    takes_agent: bool = False
    """Whether its rows are attempted by the agent of the config; else the environment has its own."""


class PackageProblems:
    """Makes the problems of an environment of a package."""

    def __init__(self, reference: str, settings: PackageSettings, *, seed: int) -> None:
        """Load the environment `PACKAGE:NAME`; raises `InvalidInputError` if that fails."""
        package, _, name = reference.partition(":")
        self._environment = PACKAGES[package].load(name, settings)
        self._seed = seed

    def make(self, *, evaluation: bool) -> Problems:
        """Its rows as problems: for training in another order each epoch, for evaluation in theirs."""
        rows = self._environment.rows(evaluation=evaluation)
        order = EpochOrder(len(rows), seed=self._seed, shuffle=not evaluation)

        def make_task(number: int) -> AgentTask:
            return rows.make_task(order.index(number))

        return Problems(agent=make_task, source=rows.source, num_problems=len(rows))


def find_package(reference: str | None) -> Package | None:
    """The package of an environment's name, None if it is a class of the user's."""
    name, colon, _ = (reference or "").partition(":")
    return PACKAGES.get(name) if colon else None


def _load_verifiers(name: str, settings: PackageSettings) -> TaskEnvironment:
    from unbroken.integrations.verifiers import load_environment

    return load_environment(name, settings.arguments)


def _load_harbor(name: str, settings: PackageSettings) -> TaskEnvironment:
    from unbroken.integrations.harbor import TerminalConfig, TerminalTasks

    section = section_of(TerminalConfig, prefix="environment_arguments.")
    config: TerminalConfig = build(section, read_table(settings.arguments, section, source="", folder=None))
    runner = _make_container_runner(config, settings) if config.containers else _make_local_runner(config, settings)
    return TerminalTasks(Path(name), runner, config, max_attempt_s=settings.limits.timeout_s)


def _make_local_runner(config: TerminalConfig, settings: PackageSettings) -> TaskRunner:
    from unbroken.integrations.harbor import LocalRunner

    agent = settings.agent
    if agent is None or not agent.command:
        raise InvalidInputError(
            "agent.command must be given with tasks of Harbor: what attempts them, such as --agent 'mini --task "
            "{instruction}'"
        )
    if agent.reward is not CommandReward.NONE:
        raise InvalidInputError("agent.reward must be left out with tasks of Harbor, whose tests give the reward")
    return LocalRunner(agent.command, variables=agent.environment, config=config, logs=settings.logs)


def _make_container_runner(config: TerminalConfig, settings: PackageSettings) -> TaskRunner:
    from unbroken.integrations.harbor.containers import ContainerRunner

    if settings.agent is not None:
        raise InvalidInputError("agent must be left out with environment_arguments.containers, which have their own")
    assert config.containers is not None
    return ContainerRunner(
        config.containers,
        trials=settings.logs or Path("trials"),
        agent_timeout_s=config.agent_timeout_s,
        reward=config.reward,
    )


PACKAGES = {"verifiers": Package(load=_load_verifiers), "harbor": Package(load=_load_harbor, takes_agent=True)}
"""By the words that names of their environments begin with."""
