"""Environments of other packages in a config: `environment = "verifiers:NAME"` or `"harbor:FOLDER"`.

They have rows and agents of their own; each attempt is a session (docs/environments.md). To add a package, add
its line to `PACKAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.rollout.agents.session import AgentTask, TaskEnvironment
from unbroken.rollout.limits import Limits
from unbroken.rollout.seeds import EpochOrder
from unbroken.runs.collector import Problems
from unbroken.runs.settings.build import build, read_table
from unbroken.runs.settings.fields import section_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSettings:
    """What an environment of a package is made from, beside its name."""

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

        return Problems(agent=make_task, source=rows.source, num_problems=len(rows))


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
        config.containers,
        trials=settings.logs,
        agent_timeout_s=config.agent_timeout_s,
        reward=config.reward,
    )
    return TerminalTasks(Path(name), runner.read, config, max_attempt_s=settings.limits.timeout_s)


PACKAGES: dict[str, Callable[[str, PackageSettings], TaskEnvironment]] = {
    "verifiers": _load_verifiers,
    "harbor": _load_harbor,
}
"""By the words that names of their environments begin with."""
