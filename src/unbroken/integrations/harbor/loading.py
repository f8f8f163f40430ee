"""A folder of terminal tasks as rows for a run: each is attempted by a command-line agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.config import TerminalConfig
from unbroken.integrations.harbor.runner import RunnableTask, TaskRunner
from unbroken.integrations.harbor.task import describe_files, find_task_folders
from unbroken.rollout.agents.session import AgentTask
from unbroken.rollout.agents.tasks import describe_rows


class TerminalTasks:
    """The tasks of a folder, for training and for evaluation."""

    def __init__(self, folder: Path, runner: TaskRunner, config: TerminalConfig, *, max_attempt_s: float) -> None:
        """Take the folder of a data set, or of one task.

        Args:
            folder: the folder.
            runner: what attempts them.
            config: which tasks are meant.
            max_attempt_s: how long the run lets an attempt take. An agent that is given longer would never be verified.
        """
        self._folder = folder
        self._runner = runner
        self._config = config
        self._max_attempt_s = max_attempt_s

    def rows(self, *, evaluation: bool) -> TerminalRows:
        """Read the tasks.

        Raises:
            InvalidInputError: the folder has no tasks, or one cannot be run here.
        """
        folders = self._find_evaluated() if evaluation else self._find_trained()
        tasks = [self._runner.read(folder) for folder in folders]
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
