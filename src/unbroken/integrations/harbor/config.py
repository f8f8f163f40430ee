"""How tasks are run: the fields of `environment_arguments`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.containers import ContainerConfig
from unbroken.integrations.harbor.local.building import RunInstructions
from unbroken.integrations.harbor.local.processes import ProcessLimits
from unbroken.integrations.harbor.local.sandbox import SandboxKind
from unbroken.rollout.limits import is_duration


class Network(StrEnum):
    """What the processes of a task may reach."""

    NONE = "none"
    """The agent the gateway; nothing else."""
    TASK = "task"
    """What the task says: with `public`, its default, all that this machine reaches, services on its loopback too."""


class Keep(StrEnum):
    """What is kept of an attempt, in the run's folder."""

    NONE = "none"
    LOGS = "logs"
    """The output of the agent and of the verifier."""
    ALL = "all"
    """And all files of the task's root folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalConfig:
    """Tasks on this machine, or in containers."""

    containers: ContainerConfig | None = None
    """Instead of this machine. `sandbox`, `network`, `run`, `readable`, `accept`, `check`, `keep`, `work_folder` and
    `limits` are then Harbor's matter, and must be left out."""
    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP
    network: Network = Network.NONE
    run: RunInstructions = RunInstructions.REFUSE
    """What is done with RUN in a Dockerfile."""
    readable: tuple[Path, ...] = ()
    """Files and folders of this machine that a task sees beside /usr and /etc, read-only: such as the agent's."""
    accept: tuple[str, ...] = ()
    """Fields, instructions and files of tasks that would be refused, by name: they are left out."""
    check: bool = True
    """Whether each task's own solution must get a reward above 0 before the task is attempted."""
    agent_timeout_s: float | None = None
    """Seconds for the agent, instead of the task's agent.timeout_sec."""
    reward: str = "reward"
    """The number of a reward.json that is the reward; the others are metrics."""
    tasks: tuple[str, ...] = ()
    """Patterns of the names of task folders, such as `sort-*`; empty: all."""
    evaluation: Path | None = None
    """The folder of tasks to evaluate on, relative to the folder of tasks; none: the same tasks."""
    evaluation_tasks: tuple[str, ...] = ()
    """Patterns of the names of the tasks to evaluate on; without `evaluation`, they are not trained on."""
    keep: Keep = Keep.LOGS
    work_folder: Path | None = None
    """Where the root folders of attempts lie while they run; none: the system's folder for temporary files."""
    limits: ProcessLimits = field(default_factory=ProcessLimits)

    def __post_init__(self) -> None:
        if self.containers is not None:
            self._check_containers()
        if self.agent_timeout_s is not None and not is_duration(self.agent_timeout_s):
            raise InvalidInputError(
                f"agent_timeout_s must be a finite number of seconds > 0, got {self.agent_timeout_s!r}"
            )
        if not all(path.is_absolute() for path in self.readable):
            raise InvalidInputError(f"readable must be absolute paths, got {[str(path) for path in self.readable]}")

    def _check_containers(self) -> None:
        of_this_machine = {field.name: field for field in fields(self) if field.name in _OF_THIS_MACHINE}
        for name, each in of_this_machine.items():
            default = each.default_factory() if callable(each.default_factory) else each.default
            if getattr(self, name) != default:
                raise InvalidInputError(f"{name} must be left out with containers, got {getattr(self, name)!r}")


_OF_THIS_MACHINE = (
    "sandbox", "network", "run", "readable", "accept", "check", "keep", "work_folder", "limits",
)  # fmt: skip
