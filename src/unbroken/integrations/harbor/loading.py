"""A folder of terminal tasks as rows for a run: each is attempted by an agent in a container."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.containers import ContainerConfig, RunnableTask
from unbroken.rollout.agents.session import AgentTask, describe_rows
from unbroken.rollout.limits import is_duration

_MAX_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalConfig:
    """How tasks are run: the fields of `environment_arguments`."""

    containers: ContainerConfig = field(default_factory=ContainerConfig)
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

    def __post_init__(self) -> None:
        if self.agent_timeout_s is not None and not is_duration(self.agent_timeout_s):
            raise InvalidInputError(
                f"agent_timeout_s must be a finite number of seconds > 0, got {self.agent_timeout_s!r}"
            )


class TerminalTasks:
    """The tasks of a folder, for training and for evaluation."""

    def __init__(
        self, folder: Path, read: Callable[[Path], RunnableTask], config: TerminalConfig, *, max_attempt_s: float
    ) -> None:
        """Take the folder of a data set, or of one task.

        Args:
            folder: the folder.
            read: reads the task in a folder (`ContainerRunner.read`).
            config: which tasks are meant.
            max_attempt_s: how long the run lets an attempt take. An agent that is given longer would never be verified.
        """
        self._folder = folder
        self._read = read
        self._config = config
        self._max_attempt_s = max_attempt_s

    def rows(self, *, evaluation: bool) -> TerminalRows:
        """Read the tasks.

        Raises:
            InvalidInputError: the folder has no tasks, or one cannot be run.
        """
        folders = self._find_evaluated() if evaluation else self._find_trained()
        tasks = [self._read(folder) for folder in folders]
        for task in tasks:
            self._check_time(task)
        return TerminalRows(tasks)

    def _find_evaluated(self) -> list[Path]:
        config = self._config
        if config.evaluation is not None:
            return find_task_folders(self._folder / config.evaluation, names=config.evaluation_tasks)
        return find_task_folders(self._folder, names=config.evaluation_tasks or config.tasks)

    def _find_trained(self) -> list[Path]:
        config = self._config
        found = find_task_folders(self._folder, names=config.tasks)
        if config.evaluation is not None or not config.evaluation_tasks:
            return found
        held_out = self._find_evaluated()
        left = [folder for folder in found if folder not in held_out]
        if not left:
            raise InvalidInputError("evaluation_tasks must leave tasks to train on, but match all of them")
        return left

    def _check_time(self, task: RunnableTask) -> None:
        limit = task.agent_timeout_s
        if limit is not None and limit >= self._max_attempt_s:
            raise InvalidInputError(
                f"rollouts.limits.timeout_s must be longer than the agent of task {task.folder} may take, "
                f"{limit:g} s, and leave time to verify what it did, got {self._max_attempt_s:g}: make it longer, or "
                "set environment_arguments.agent_timeout_s"
            )


class TerminalRows:
    """Tasks as rows."""

    def __init__(self, tasks: Sequence[RunnableTask]) -> None:
        """Take the tasks."""
        self._tasks = tasks
        rows = [{"name": task.folder.name, "files": describe_files(task.folder)} for task in tasks]
        self.source = describe_rows(rows, num_rows=len(rows), package="harbor")

    def __len__(self) -> int:
        return len(self._tasks)

    def make_task(self, index: int) -> AgentTask:
        """See `TaskRows`."""
        task = self._tasks[index]
        return AgentTask(agent=task.attempt, task={"task": task.name, "instruction": task.instruction})


def find_task_folders(folder: Path, *, names: Sequence[str] = ()) -> list[Path]:
    """The folders of the tasks of a data set, in the order of their names, or of the one task that `folder` is.

    `names` are patterns such as `sort-*`; without any, all tasks are meant.

    Raises:
        InvalidInputError: there is no task.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"environment must be harbor:FOLDER, a folder of tasks, got {folder}: no such folder")
    found = [folder] if _is_task(folder) else sorted(each for each in folder.iterdir() if _is_task(each))
    chosen = [each for each in found if not names or any(fnmatch.fnmatchcase(each.name, name) for name in names)]
    if not chosen:
        wanted = f" with a name like {', '.join(names)}" if names else ""
        raise InvalidInputError(f"environment must be harbor:FOLDER, but {folder} has no task{wanted}: no task.toml")
    return chosen


def describe_files(folder: Path) -> str:
    """A digest of a task's files; of large ones only the length counts."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        digest.update(file.read_bytes() if size <= _MAX_HASHED_BYTES else b"")
    return digest.hexdigest()[:16]


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()
