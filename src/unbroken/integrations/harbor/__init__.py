"""Terminal tasks in Harbor's layout, attempted by command-line agents in sessions (docs/environments.md)."""

from unbroken.integrations.harbor.config import Keep, LocalConfig, Network
from unbroken.integrations.harbor.loading import TerminalTasks
from unbroken.integrations.harbor.local import LocalRunner
from unbroken.integrations.harbor.task import TerminalTask, find_task_folders, read_task

__all__ = [
    "Keep",
    "LocalConfig",
    "LocalRunner",
    "Network",
    "TerminalTask",
    "TerminalTasks",
    "find_task_folders",
    "read_task",
]
