"""Agents that others wrote, unmodified, in a gateway's session: each runs tools for five turns and more.

`make agents` installs them, runs this, and prints the table at its end. A scripted engine plays the model.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.agent_players import ADDITIONS, ANSWER, NOTES, Player, Step, add_up, count_trained, write_notes
from support.agent_programs import (
    AI_SDK,
    CLAUDE_CODE,
    CODEX,
    GEMINI_CLI,
    OPENCODE,
    Program,
    make_environment,
    mini_swe_agent,
    script,
)
from support.gateways import make_gateway
from support.servers import listening, scripted_engine
from unbroken.client import AsyncClient

pytestmark = pytest.mark.clients
TIME_LIMIT_S = 120
HEADER = (
    "| agent | dialect | turns | bridged | forks per 100 turns | tolerances | rows | turns exact |",
    "|---|---|---|---|---|---|---|---|",
)
SUMS = (
    script("openai", "chat", venv=None),
    script("openai_responses", "Responses", venv=None),
    script("anthropic", "Messages"),
    script("gemini", "Gemini"),
    script("litellm", "chat"),
    script("langchain", "chat", venv="langchain"),
    script("pydantic_ai", "chat"),
    script("openai_agents", "Responses", venv="openai-agents"),
    script("agent_framework", "Responses", venv="agent-framework"),
    AI_SDK,
)
SHELLS = (mini_swe_agent(text=False), mini_swe_agent(text=True), CODEX, CLAUDE_CODE, OPENCODE, GEMINI_CLI)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an agent did in its session, and what the session recorded."""

    program: Program
    done: subprocess.CompletedProcess[str]
    session: dict[str, Any]
    num_rows: int
    num_sampled: int
    """Turns that the engine sampled."""
    num_exact: int
    """Those whose ids one row trains, at their place."""
    num_left: int
    """Ids that are trained beside them."""

    @property
    def counters(self) -> dict[str, int]:
        return self.session["counters"]

    @property
    def forks(self) -> Counter[str]:
        return Counter(fork["reason"] for fork in self.session["forks"])

    def read_report(self) -> dict[str, Any]:
        """What a script prints as its last line."""
        found: dict[str, Any] = json.loads(self.done.stdout.splitlines()[-1])
        return found


class Table:
    """The attempts so far, as a table in Markdown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, attempt: Attempt, version: str) -> None:
        num_turns = attempt.session["num_turns"]
        forks = ", ".join(f"{reason} {number}" for reason, number in attempt.forks.items())
        tolerances = ", ".join(
            f"`{name.removeprefix('tolerances/')}` {number}"
            for name, number in sorted(attempt.counters.items())
            if name.startswith("tolerances/")
        )
        self.lines.append(
            f"| {attempt.program.name} {version} | {attempt.program.dialect} | {num_turns} "
            f"| {count(attempt.counters, 'bridges/')} | {100 * attempt.forks.total() / num_turns:.0f}"
            f"{f' ({forks})' if forks else ''} | {tolerances} | {attempt.num_rows} "
            f"| {attempt.num_exact} of {attempt.num_sampled} |"
        )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    table = Table()
    yield table
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *HEADER, *table.lines, sep="\n")


def run_in_session(program: Program, step: Step, folder: Path) -> Attempt:
    """Run an agent in a session of its own and read what was recorded."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    program.command("http://localhost", work)  # skips if it is not installed
    player = Player(step)
    app = make_gateway(scripted_engine(player, context_length=2**20), folder / "store")

    async def run() -> Attempt:
        async with listening(app) as url, AsyncClient(url) as client:
            created = await client.sessions.create()
            session_id = created["session_id"]
            done = await asyncio.to_thread(_run, program, created["anthropic_base_url"], work, home)
            session: Any = await client.sessions.get(session_id)
            rows = await client.sessions.samples(session_id, advantage=1.0)
        num_exact, num_left = count_trained(rows, player.turns)
        return Attempt(
            program=program,
            done=done,
            session=session,
            num_rows=len(rows),
            num_sampled=len(player.turns),
            num_exact=num_exact,
            num_left=num_left,
        )

    attempt = asyncio.run(run())
    assert attempt.done.returncode == 0, attempt.done.stderr[-4000:] + attempt.done.stdout[-2000:]
    return attempt


def _run(program: Program, url: str, work: Path, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        program.command(url, work),
        env=make_environment(program, url, home),
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )


def count(counters: dict[str, int], prefix: str) -> int:
    return sum(number for name, number in counters.items() if name.startswith(prefix))


def check_exact(attempt: Attempt) -> None:
    """I4: the ids that are trained are those that the engine sampled, each once."""
    assert attempt.session["num_turns"] == attempt.num_sampled == attempt.num_exact
    assert attempt.num_left == 0


@pytest.mark.parametrize("program", SUMS, ids=lambda program: program.name)
def test_i4_an_agent_that_calls_a_tool_is_exact_and_never_forks(program: Program, table: Table, tmp_path: Path) -> None:
    attempt = run_in_session(program, add_up, tmp_path)
    found = attempt.read_report()
    table.add(attempt, found["version"])
    assert found["answer"] == found["streamed"] == ANSWER
    assert found["calls"] == [list(added) for added in ADDITIONS] * 2
    check_exact(attempt)
    assert attempt.session["forks"] == []
    assert count(attempt.counters, "bridges/") == 2 * len(ADDITIONS)


def test_i4_smolagents_is_exact_and_never_forks(table: Table, tmp_path: Path) -> None:
    """It lists the calls in the text of each reply that it sends back; of code it makes such a call.

    The three runs are of its agent with tools, of its agent with code, and of the first by its defaults.
    """
    attempt = run_in_session(script("smolagents", "chat"), add_up, tmp_path)
    found = attempt.read_report()
    table.add(attempt, found["version"])
    assert found["answer"] == found["code"] == found["required"] == ANSWER
    assert found["calls"] == [list(added) for added in ADDITIONS] * 3
    check_exact(attempt)
    assert attempt.session["forks"] == []
    assert count(attempt.counters, "bridges/") == 3 * len(ADDITIONS)
    assert attempt.num_rows == 3


@pytest.mark.parametrize("program", SHELLS, ids=lambda program: program.name)
def test_i4_an_agent_that_works_in_a_shell_is_exact_and_never_forks(
    program: Program, table: Table, tmp_path: Path
) -> None:
    attempt = run_in_session(program, write_notes, tmp_path)
    assert program.read_version is not None
    table.add(attempt, program.read_version())
    assert (tmp_path / "work" / "notes.txt").read_text() == NOTES
    check_exact(attempt)
    assert attempt.session["forks"] == []
    assert attempt.num_sampled >= 6
