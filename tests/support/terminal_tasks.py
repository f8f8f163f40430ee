"""Terminal tasks for tests, in Harbor's layout: count words, and write the number down."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.agent_players import TASK

INSTRUCTION = "Count the words in words.txt and write the number into /app/count.txt."
TASK_TOML = """
schema_version = "1.4"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0
"""
DOCKERFILE = """
# Three words.
FROM ubuntu:24.04
WORKDIR /app
ENV GREETING="hello task"
COPY words.txt data/ ./
"""
TEST = """#!/bin/bash
if [ "$(cat /app/count.txt)" = 3 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLUTION = """#!/bin/bash
wc -w < words.txt > count.txt
"""


def write_task(folder: Path, **files: str) -> Path:
    """Write the task to a folder. `files` replace or add texts by their paths, or by the last part
    of it, with `_` for a dot."""
    texts = {
        "instruction.md": f"<!-- a canary for benchmarks -->\n\n{INSTRUCTION}",
        "task.toml": TASK_TOML,
        "environment/Dockerfile": DOCKERFILE,
        "environment/words.txt": "one two three\n",
        "environment/data/more.txt": "four\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLUTION,
    }
    names = {Path(name).name.replace(".", "_"): name for name in texts}
    texts |= {names.get(name, name): text for name, text in files.items()}
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


NOTES_TEST = """#!/bin/bash
if [ "$(cat notes.txt)" = "$(printf 'one\\ntwo')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
AGENT = Path(__file__).with_name("terminal_agent.py")


def write_notes_task(folder: Path) -> Path:
    """Write a task that the scripted model of `agent_players.write_notes` solves."""
    return write_task(
        folder,
        instruction_md=TASK,
        Dockerfile="FROM debian\nWORKDIR /app\n",
        solve_sh="printf 'one\\ntwo\\n' > notes.txt\n",
        test_sh=NOTES_TEST,
    )


def agent_command(*options: str) -> list[str]:
    """The words that start the small agent, with the system's Python."""
    return [find_python(), str(AGENT), *options, "{instruction}"]


def find_python() -> str:
    """A Python that a sandbox shows: the one below the running one's packages."""
    return str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))


def find_reason_without_bubblewrap() -> str | None:
    """Why no task can run in a sandbox on this machine, if so."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    tried = subprocess.run(
        ["bwrap", "--ro-bind", "/", "/", "--unshare-user", "--unshare-pid", "--unshare-net", "--proc", "/proc", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"bwrap cannot make namespaces: {tried.stderr.strip()}" if tried.returncode else None


WITHOUT_BUBBLEWRAP = find_reason_without_bubblewrap()
needs_bubblewrap = pytest.mark.skipif(WITHOUT_BUBBLEWRAP is not None, reason=str(WITHOUT_BUBBLEWRAP))
