"""A trial of the package harbor, in a container.

    python harbor_trial.py SESSION TASK TRIALS ENVIRONMENT

SESSION is a session's JSON, TASK a task's folder, TRIALS where Harbor keeps its trials, ENVIRONMENT docker or podman.
Prints the outcome.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.installed.claude_code import ClaudeCode
from harbor.agents.installed.codex import Codex
from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.environments.base import BaseEnvironment

from unbroken.integrations.harbor import ContainerConfig, ContainerRunner
from unbroken.rollout.agents.session import AgentSession

SCRIPT = Path(__file__).parents[2] / "support" / "terminal_agent.py"


class ScriptAgent(BaseAgent):
    """The small agent of these tests, as one of Harbor."""

    @staticmethod
    def name() -> str:
        return "script"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        await environment.upload_file(SCRIPT, "/agent.py")

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        variables = {**self._extra_env, "INSTRUCTION": instruction}
        await environment.exec('python3 /agent.py "$INSTRUCTION"', env=variables)


def find_connections(session: AgentSession, task: Path) -> dict[str, Any]:
    """The base URL and the keys that agents of Harbor would use for a session."""
    found = {}
    for kind, provider in ((MiniSweAgent, "openai"), (Codex, "openai"), (ClaudeCode, "anthropic")):
        config = ContainerConfig(agent=kind.name(), model=provider + "/{model}", gateway_host="172.17.0.1")
        runner = ContainerRunner(config, trials=task, agent_timeout_s=None, reward="reward")
        made = runner.make_trial_config(task, session).agent
        agent = kind(logs_dir=task, model_name=made.model_name, extra_env=made.env)
        connection = agent.model_connection
        keys = {value for name, value in connection.env.items() if "KEY" in name}
        found[made.name] = [connection.user_supplied_base_url, *keys]
    return found


async def main(session: str, task: str, trials: str, environment: str) -> None:
    runner = ContainerRunner(
        ContainerConfig(agent="harbor_trial:ScriptAgent", environment={"type": environment}, gateway_host="127.0.0.1"),
        trials=Path(trials),
        agent_timeout_s=100,
        reward="reward",
    )
    read = runner.read(Path(task))
    opened = AgentSession(**json.loads(session))
    try:
        outcome = await read.attempt(opened)
        found: Any = outcome.reward if not hasattr(outcome, "metrics") else [outcome.reward, dict(outcome.metrics)]
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    connections = find_connections(opened, Path(task))
    print(json.dumps({"name": read.name, "instruction": read.instruction, "found": found, "connections": connections}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
