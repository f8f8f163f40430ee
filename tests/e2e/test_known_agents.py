"""Each known agent, as PyPI and npm have it, by its entry of the table alone: a task in a copy of a folder, checked.

`make agents` installs them and runs this. A scripted engine plays the model.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from support.agent_players import NOTES, TASK, Player, count_trained, write_notes
from support.agent_programs import VENVS
from support.gateways import make_gateway
from support.servers import listening, scripted_engine
from unbroken.client import AsyncClient
from unbroken.rollout.agents.command import Check, CommandAgent, Workspace
from unbroken.rollout.agents.known import KNOWN_AGENTS
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.types import SamplingParams

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", KNOWN_AGENTS)
async def test_i4_a_known_agent_does_a_task_in_a_copy_of_a_folder_and_its_row_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (VENVS / "npm" / "node_modules" / ".bin", VENVS / "mini-swe-agent" / "bin")
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], *map(str, folders)]))
    known = KNOWN_AGENTS[name]
    if shutil.which(known.program) is None:
        pytest.skip("`make agents` installs it, with npm")
    project = tmp_path / "project"
    project.mkdir()
    (project / "readme.txt").write_text("Notes belong into notes.txt.")
    agent = CommandAgent(
        known=known,
        instruction=TASK,
        workspace=Workspace(folder=project, leave_out=tmp_path / "runs"),
        check=Check(command=("sh", "-c", f"test -e readme.txt && printf '{NOTES}' | cmp - notes.txt"), timeout_s=60),
        logs=tmp_path / "logs",
    )
    player = Player(write_notes)
    app = make_gateway(scripted_engine(player, context_length=2**20), tmp_path / "store")
    async with listening(app) as url, AsyncClient(url) as client:
        group = await run_agent_group(
            agent,
            1,
            gateway=client.sessions,
            task={"prompt": TASK},
            sampling=SamplingParams(max_tokens=4096),
            limits=Limits(max_turns=50, max_tokens=100_000, timeout_s=120),
        )
        (session,) = await client.sessions.list()
        rows = await client.sessions.samples(session["session_id"], advantage=1.0)
    (found,) = group.trajectories
    log = "".join(path.read_text() for path in sorted((tmp_path / "logs").iterdir()))
    assert (found.status, found.reward) == (TrajectoryStatus.COMPLETED, 1.0), f"{found.error}\n{log[-4000:]}"
    assert found.reward_parts == {"agent_failed": 0.0}
    assert count_trained(rows, player.turns) == (len(player.turns), 0)
    assert len(player.turns) >= 6
    assert all(turn.fork is None for turn in found.turns)
    assert [each.name for each in project.iterdir()] == ["readme.txt"]
