"""Terminal tasks through a gateway: a trial of the package harbor in a real container, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from support.agent_players import TASK, Player, count_trained, write_notes
from support.agent_programs import find_python
from support.attempts import sample_attempts
from support.servers import scripted_engine
from support.terminal_tasks import write_notes_task
from unbroken.ledger.tree import export_samples
from unbroken.rollout.agents.session import AgentOutcome, AgentSession, AgentTask
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig
from unbroken.types import SamplingParams

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"


def find_engine() -> tuple[str, str]:
    """The engine that starts containers, and an image with Python that it has or can fetch.

    CONTAINERS names both, such as `podman=localhost/debian:bookworm`.
    """
    named, _, image = os.environ.get("CONTAINERS", "").partition("=")
    engine = named or next(filter(shutil.which, ("docker", "podman")), "")
    if not engine:
        pytest.skip("neither docker nor podman is installed")
    return engine, image or "docker.io/library/python:3.13-slim"


@pytest.mark.clients
async def test_i4_a_trial_in_a_container_has_a_session_as_its_agents_model(tmp_path: Path) -> None:
    """`make agents` installs Harbor. The container shares this machine's network, so that it reaches the gateway."""
    engine, image = find_engine()
    player = Player(write_notes)
    task = write_notes_task(tmp_path / "notes", image=image)
    (task / "environment" / "docker-compose.yaml").write_text("services:\n  main:\n    network_mode: host\n")
    python = find_python("harbor")

    async def attempt(session: AgentSession) -> AgentOutcome:
        opened = {name: value for name, value in asdict(session).items() if name != "preparation"}
        words = [CLIENTS / "harbor_trial.py", json.dumps(opened), task, tmp_path / "trials", engine]
        process = await asyncio.create_subprocess_exec(
            str(python),
            *map(str, words),
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),  # podman-compose
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(CLIENTS)]),
                "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            },
        )
        output, _ = await process.communicate()
        printed = json.loads(output.splitlines()[-1])
        assert isinstance(printed["found"], list), printed
        assert (printed["name"], printed["instruction"]) == ("notes", TASK)
        urls = [url.replace("127.0.0.1", "172.17.0.1") for url in (session.openai_base_url, session.anthropic_base_url)]
        assert printed["connections"] == {
            "mini-swe-agent": [urls[0], session.api_key],
            "codex": [urls[0], session.api_key],
            "claude-code": [urls[1], session.api_key],
        }
        reward, metrics = printed["found"]
        return AgentOutcome(reward=reward, metrics=metrics)

    problems = Problems(agent=lambda number: AgentTask(agent=attempt, task={"instruction": TASK}))
    config = RolloutConfig(limits=Limits(timeout_s=300), sampling=SamplingParams(max_tokens=1000))
    scripted = scripted_engine(player, context_length=2**16)
    (done,) = (await sample_attempts(tmp_path, scripted, problems, config, size=1)).trajectories
    assert (done.error, done.status, done.reward) == (None, TrajectoryStatus.COMPLETED, 1.0)
    assert dict(done.reward_parts) == {"agent_timed_out": 0.0, "agent_failed": 0.0}
    assert count_trained(export_samples(done.tree, 1.0), player.turns) == (6, 0)
