"""Terminal tasks for tests, in Harbor's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.agent_players import TASK

STAND_IN = Path(__file__).parent / "stand_ins" / "harbor_0_25"
"""What the integration uses of the package harbor. A trial ends as the task's `tests/end.json` says."""
TASK_TOML = """
schema_version = "1.4"

[agent]
timeout_sec = 60.0
"""
NOTES_TEST = """#!/bin/bash
if [ "$(cat notes.txt)" = "$(printf 'one\\ntwo')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_notes_task(folder: Path, *, image: str = "debian", **end: Any) -> Path:
    """Write a task that the scripted model of `agent_players.write_notes` solves; `end` is for the stand-in."""
    texts = {
        "instruction.md": TASK,
        "task.toml": TASK_TOML,
        "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n",
        "tests/test.sh": NOTES_TEST,
        "tests/end.json": json.dumps(end),
    }
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder
