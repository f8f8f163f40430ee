"""Loads tasksets and environments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifiers.v1 import AgentConfig, Data, Env, EnvConfig, Task, Taskset


def resolve_env_config(fields: dict[str, Any]) -> EnvConfig:
    if fields["taskset"]["id"] != "cells":
        raise ModuleNotFoundError(f"taskset {fields['taskset']['id']!r} not found")
    agents = {name: AgentConfig(client) for name, client in fields.pop("agents", {"agent": None}).items()}
    return EnvConfig(agents=agents, **{**fields, "taskset": SimpleNamespace(**fields["taskset"])})


def load_taskset(taskset: Any) -> Taskset:
    tasks = Taskset(Task(Data(f"What is in cell {cell}?")) for cell in range(getattr(taskset, "cells", 2)))
    tasks.bounded = not getattr(taskset, "infinite", False)
    return tasks


def load_environment(config: EnvConfig) -> Env:
    return Env(config)
