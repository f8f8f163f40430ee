"""Terminal tasks in Harbor's layout, attempted by command-line agents in sessions (docs/environments.md)."""

from unbroken.integrations.harbor.config import Keep, Network, TerminalConfig
from unbroken.integrations.harbor.loading import TerminalTasks
from unbroken.integrations.harbor.local.attempts import LocalRunner
from unbroken.integrations.harbor.task import TerminalTask, find_task_folders, read_task

__all__ = [
    "Keep",
    "LocalRunner",
    "Network",
    "TerminalConfig",
    "TerminalTask",
    "TerminalTasks",
    "find_task_folders",
    "read_task",
]
