"""Terminal tasks through a gateway: an agent of a terminal, in a sandbox, with a scripted model and with a tiny one."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.agent_players import TASK, Player, count_trained, write_notes
from support.agent_programs import CODEX, VENVS, find_python, mini_swe_agent
from support.attempts import sample_attempts
from support.served import save_tiny_model
from support.servers import scripted_engine
from support.terminal_tasks import AGENT, agent_command, needs_bubblewrap, write_notes_task, write_task
from unbroken.cli import main
from unbroken.ledger.export import export_samples
from unbroken.rollout.agents.session import AgentOutcome, AgentSession, AgentTask
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.runs.collector import Problems
from unbroken.runs.config import RolloutConfig
from unbroken.runs.prompts.agents import AgentConfig
from unbroken.runs.prompts.packages import PackageProblems, PackageSettings
from unbroken.types import SamplingParams

pytestmark = needs_bubblewrap
ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
TASK_WORD = "{instruction}"
RANDOM_TEST = """#!/bin/bash
echo "{\\"reward\\": 0.1$RANDOM, \\"words\\": $(wc -w < words.txt)}" > /logs/verifier/reward.json
"""


async def attempt(
    folder: Path,
    player: Player,
    command: Sequence[str],
    *,
    task: Path,
    size: int = 1,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[Trajectory]:
    """Attempts of a task with a scripted model."""
    settings = PackageSettings(
        arguments={"readable": [str(AGENT.parent)], **arguments},
        agent=AgentConfig(command=tuple(command), environment=variables or {}),
        logs=folder / "agents",
    )
    problems = PackageProblems(f"harbor:{task}", settings, seed=0).make(evaluation=False)
    return await sample(folder, player, problems, size=size)


async def sample(folder: Path, player: Player, problems: Problems, *, size: int = 1) -> list[Trajectory]:
    """Attempts of problem 0 with a scripted model."""
    engine = scripted_engine(player, context_length=2**16)
    config = RolloutConfig(limits=Limits(timeout_s=120), sampling=SamplingParams(max_tokens=1000))
    return list((await sample_attempts(folder, engine, problems, config, size=size)).trajectories)


@pytest.mark.parametrize("options", [(), ("--text",)], ids=["calls", "text"])
async def test_i4_an_agent_solves_a_task_in_a_sandbox_and_its_ids_are_exact(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    player = Player(write_notes)
    (done,) = await attempt(tmp_path, player, agent_command(*options), task=write_notes_task(tmp_path / "notes"))
    assert (done.error, done.status, done.reward) == (None, TrajectoryStatus.COMPLETED, 1.0)
    assert dict(done.reward_parts) == {"agent_timed_out": 0.0, "agent_failed": 0.0}
    rows = export_samples(done.tree, 1.0)
    assert len(rows) == 1
    assert count_trained(rows, player.turns) == (6, 0)


async def test_a_model_that_does_nothing_gets_the_reward_of_the_untouched_environment(tmp_path: Path) -> None:
    player = Player(lambda prompt, number: None)
    (done,) = await attempt(tmp_path, player, agent_command(), task=write_notes_task(tmp_path / "notes"))
    assert (done.status, done.reward) == (TrajectoryStatus.COMPLETED, 0.0)
    (folder,) = (tmp_path / "agents").iterdir()
    assert {file.name for file in folder.iterdir()} == {"agent.log", "agent.err", "verifier.log"}
    assert "Aside 0." in (folder / "agent.log").read_text()


@pytest.mark.clients
@pytest.mark.parametrize("text", [False, True], ids=["calls", "text"])
async def test_i4_mini_swe_agent_solves_a_task_in_a_sandbox(tmp_path: Path, text: bool) -> None:
    """`make agents` installs it."""
    program = mini_swe_agent(text=text)
    words = [TASK_WORD if word == TASK else word for word in program.command("http://localhost", tmp_path)]
    variables = {**program.environment("{anthropic_base_url}"), "HOME": "/root"}  # the URL without /v1
    await check_solved(tmp_path, words, variables, readable=[find_python("mini-swe-agent").parents[1]])


@pytest.mark.clients
async def test_i4_codex_solves_a_task_in_a_sandbox(tmp_path: Path) -> None:
    """`make agents` installs it. Its own sandbox is off: it is in one."""
    words = [TASK_WORD if word == TASK else word for word in CODEX.command("{anthropic_base_url}", tmp_path)]
    await check_solved(tmp_path, words, {"HOME": "/root"}, readable=[VENVS / "npm"])


@pytest.mark.clients
async def test_i4_a_trial_of_harbor_has_a_session_as_its_agents_model(tmp_path: Path) -> None:
    """`make agents` installs Harbor. Its container is a sandbox of ours here; all else of the trial is its own."""
    player = Player(write_notes)
    task = write_notes_task(tmp_path / "notes")
    python = find_python("harbor")

    async def attempt(session: AgentSession) -> AgentOutcome:
        words = [str(CLIENTS / "harbor_trial.py"), json.dumps(asdict(session)), str(task), str(tmp_path / "trials")]
        paths = os.pathsep.join([str(ROOT / "src"), str(CLIENTS)])
        process = await asyncio.create_subprocess_exec(
            str(python),
            *words,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "true"},
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
    (done,) = await sample(tmp_path, player, problems)
    assert (done.error, done.status, done.reward) == (None, TrajectoryStatus.COMPLETED, 1.0)
    assert dict(done.reward_parts) == {"agent_timed_out": 0.0, "agent_failed": 0.0}
    assert count_trained(export_samples(done.tree, 1.0), player.turns) == (6, 0)


async def check_solved(folder: Path, words: list[str], variables: dict[str, str], *, readable: list[Path]) -> None:
    """Let an agent that others wrote solve the task, with a scripted model."""
    player = Player(write_notes)
    task = write_notes_task(folder / "notes")
    paths = [str(path) for path in readable]
    (done,) = await attempt(folder, player, words, task=task, variables=variables, readable=paths)
    assert (done.error, done.status, done.reward) == (None, TrajectoryStatus.COMPLETED, 1.0)
    rows = export_samples(done.tree, 1.0)
    assert (len(player.turns), len(rows)) == (6, 1)
    assert count_trained(rows, player.turns) == (6, 0)


def test_i4_one_command_trains_on_a_folder_of_terminal_tasks(tmp_path: Path) -> None:
    for name in ("count", "again"):
        write_task(tmp_path / "tasks" / name, test_sh=RANDOM_TEST)
    output = tmp_path / "run"
    program, script, instruction = agent_command()
    words = [
        "train", "--env", f"harbor:{tmp_path / 'tasks'}", f"--agent={program} {script} '{instruction}'",
        f"--model={save_tiny_model(tmp_path / 'model')}", f"--output={output}",
        f'--environment-arguments={{readable = ["{AGENT.parent}"]}}', "--loop.num-steps=2",
        "--rollouts.problems-per-step=2", "--rollouts.group-size=2", "--rollouts.sampling.max-tokens=8",
        "--trainer.optimizer.learning-rate=1e-3",
    ]  # fmt: skip
    assert main(words) == 0
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert 0.1 <= line["reward/mean"] < 0.2
        assert (line["reward/agent_failed_mean"], line["reward/words_mean"]) == (0, 3)
        assert line["rollout/turns_mean"] == 1
        assert line["mismatch/max_abs"] < 1e-4
    assert len(list((output / "agents").iterdir())) == 8
    assert re.search("role", next((output / "agents").glob("*/agent.log")).read_text())
