"""Attempts of terminal tasks on this machine, by a script in place of an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.integrations.harbor import Keep, LocalRunner, TerminalConfig, read_task
from unbroken.rollout.agents.session import AgentOutcome, AgentSession

SOLVE = "wc -w < words.txt > /app/count.txt"


def make_session(port: int = 9) -> AgentSession:
    return AgentSession(
        session_id="one",
        api_key="the-key",
        openai_base_url=f"http://127.0.0.1:{port}/s/one/v1",
        anthropic_base_url=f"http://127.0.0.1:{port}/s/one",
        model="policy",
        task={"task": "count", "instruction": "Count them."},
    )


async def attempt(folder: Path, script: str, *, port: int = 9, **config: Any) -> AgentOutcome:
    """One attempt of the task in `folder` by a script of bash."""
    settings = TerminalConfig(**{"check": False, "keep": Keep.ALL, **config})
    runner = LocalRunner(["bash", "-c", script], config=settings, logs=folder.parent / "logs")
    task = read_task(folder)
    runner.check(task)
    return await runner.attempt(task, make_session(port))


def read_log(folder: Path, name: str = "agent.log") -> str:
    return (folder.parent / "logs" / "one" / name).read_text()
