"""Terminal tasks in Harbor's layout, attempted in containers by agents with sessions (docs/environments.md)."""

from unbroken.integrations.harbor.containers import ContainerConfig, ContainerRunner
from unbroken.integrations.harbor.loading import TerminalConfig, TerminalTasks, find_task_folders

__all__ = ["ContainerConfig", "ContainerRunner", "TerminalConfig", "TerminalTasks", "find_task_folders"]
