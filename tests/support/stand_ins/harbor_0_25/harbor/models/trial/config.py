from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TaskConfig:
    path: Path


@dataclass
class AgentConfig:
    name: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    override_timeout_sec: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class EnvironmentConfig:
    type: str | None = None


@dataclass
class TrialConfig:
    task: TaskConfig
    trial_name: str
    trials_dir: Path
    agent: AgentConfig
    environment: EnvironmentConfig
