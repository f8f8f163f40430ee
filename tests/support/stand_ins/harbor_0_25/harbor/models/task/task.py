import tomllib
from pathlib import Path
from types import SimpleNamespace


class Task:
    def __init__(self, task_dir: Path) -> None:
        config = tomllib.loads((task_dir / "task.toml").read_text())
        self.config = SimpleNamespace(agent=SimpleNamespace(timeout_sec=config.get("agent", {}).get("timeout_sec")))
        self.name = task_dir.name
        self.instruction = (task_dir / "instruction.md").read_text()
