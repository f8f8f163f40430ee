"""A trial of the package harbor, in an environment that is a sandbox of bubblewrap instead of a container.

    python harbor_trial.py SESSION TASK TRIALS

SESSION is a session's JSON, TASK a task's folder, TRIALS where Harbor keeps its trials. Prints the outcome.
The container is a stand-in; trial, task, verifier and agent are Harbor's own classes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.installed.claude_code import ClaudeCode
from harbor.agents.installed.codex import Codex
from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.environments.base import BaseEnvironment, ExecResult

from unbroken.integrations.harbor.containers import ContainerConfig, ContainerRunner
from unbroken.integrations.harbor.local.files import make_folder
from unbroken.integrations.harbor.local.sandbox import Bubblewrap
from unbroken.rollout.agents.session import AgentSession

SCRIPT = Path(__file__).parents[2] / "support" / "terminal_agent.py"


class SandboxEnvironment(BaseEnvironment):
    """Files of a task in a folder, and commands in a sandbox over it, with this machine's network."""

    _root: Path

    @staticmethod
    def type() -> str:
        return "sandbox"

    def _validate_definition(self) -> None:
        assert (self.environment_dir / "Dockerfile").exists()

    async def start(self, force_build: bool) -> None:
        self._root = Path(tempfile.mkdtemp())
        self._sandbox = Bubblewrap.find(())
        for path in ("/app", "/logs/agent", "/logs/verifier", "/logs/artifacts"):
            make_folder(self._root, path)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(source_path, self._root / target_path.lstrip("/"))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, make_folder(self._root, target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._root / source_path.lstrip("/"), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._root / source_dir.lstrip("/"), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        words, folder = self._sandbox.wrap(
            ["bash", "-c", command], root=self._root, workdir=cwd or "/app", has_network=True
        )
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **(self._merge_env(env) or {})}
        process = await asyncio.create_subprocess_exec(
            *words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        assert process.returncode is not None
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


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
        await environment.exec('/usr/bin/python3 /agent.py "$INSTRUCTION"', env=variables)


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


async def main(session: str, task: str, trials: str) -> None:
    runner = ContainerRunner(
        ContainerConfig(
            agent="harbor_trial:ScriptAgent",
            environment={"import_path": "harbor_trial:SandboxEnvironment"},
            gateway_host="127.0.0.1",
        ),
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
    asyncio.run(main(*sys.argv[1:4]))
