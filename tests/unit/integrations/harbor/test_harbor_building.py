"""Environments of terminal tasks made from Dockerfiles on this machine: what is copied where, and what is refused."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from support.open_files import find_open_files
from support.terminal_attempts import SOLVE, attempt, make_session
from support.terminal_tasks import DOCKERFILE, needs_bubblewrap, write_task
from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor import (
    Keep,
    LocalRunner,
    TerminalConfig,
    read_task,
)
from unbroken.integrations.harbor.local.building import RunInstructions, build_root
from unbroken.integrations.harbor.local.processes import Command, ProcessLimits, run_command
from unbroken.integrations.harbor.local.sandbox import SandboxKind, open_sandbox


async def build(tmp_path: Path, dockerfile: str, *, links: dict[str, Path] | None = None) -> Path:
    """Follow a Dockerfile; `links` are what its RUN instructions have made before."""
    task = read_task(write_task(tmp_path / "task", Dockerfile=f"FROM a\n{dockerfile}\n"))
    root = tmp_path / "root"
    root.mkdir()
    for name, target in (links or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    sandbox = open_sandbox(SandboxKind.NONE)
    await build_root(task, root, sandbox, ProcessLimits(), run=RunInstructions.SKIP, has_network=False)
    return root


@pytest.mark.parametrize(
    ("copy", "link"),
    [
        ("COPY words.txt /app/words.txt", "app/words.txt"),
        ("COPY words.txt /app/", "app"),
        ("COPY words.txt /app", "app"),
        ("COPY . /app/", "app/words.txt"),
        ("COPY . /app/", "app/data"),
        ("COPY . /app/deep", "app"),
    ],
)
async def test_copy_follows_no_link_to_this_machine(tmp_path: Path, copy: str, link: str) -> None:
    """A RUN in the sandbox may have made it: its target would be written outside of the sandbox."""
    outside = tmp_path / "outside"
    outside.mkdir()
    with pytest.raises(TaskError, match=f"COPY to .*/{link}, a link that an earlier instruction made"):
        await build(tmp_path, copy, links={link: outside})
    assert list(outside.iterdir()) == []


@needs_bubblewrap
async def test_a_link_that_the_environment_has_for_the_solution_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    task = write_task(tmp_path / "task", Dockerfile=f"{DOCKERFILE}RUN ln -s {tmp_path}/outside /solution\n")
    outcome = await attempt(task, SOLVE, check=True, run=RunInstructions.SANDBOX)
    assert outcome.reward == 1.0
    assert list((tmp_path / "outside").iterdir()) == []


async def test_copy_gives_its_mode_to_the_files_of_a_folder_too(tmp_path: Path) -> None:
    root = await build(tmp_path, "COPY --chmod=751 data/ /app/data/\nCOPY --chmod=640 words.txt /app/")
    assert stat.S_IMODE((root / "app" / "data" / "more.txt").stat().st_mode) == 0o751
    assert stat.S_IMODE((root / "app" / "words.txt").stat().st_mode) == 0o640


@needs_bubblewrap
async def test_a_solution_without_a_reward_shows_that_the_task_cannot_be_solved_here(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", solve_sh="no-such-program > count.txt")
    with pytest.raises(TaskError, match="its own solution gets the reward 0, so it cannot be solved here as it is"):
        await attempt(task, SOLVE, check=True)


@needs_bubblewrap
async def test_an_environment_is_built_and_checked_once(tmp_path: Path) -> None:
    marks = f"echo built >> {tmp_path}/marks"  # in a sandbox no such folder is there
    task = write_task(tmp_path / "task", Dockerfile=f"{DOCKERFILE}RUN date +%N > /built; {marks} || true\n")
    runner = LocalRunner(
        ["bash", "-c", f"{SOLVE}; cat /built"],
        config=TerminalConfig(run=RunInstructions.SANDBOX, keep=Keep.ALL),
        logs=tmp_path / "logs",
    )
    read = read_task(task)
    sessions = [replace(make_session(), session_id=name) for name in "abc"]
    outcomes = await asyncio.gather(*(runner.attempt(read, session) for session in sessions))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 3
    assert len({(tmp_path / "logs" / name / "agent.log").read_text() for name in "abc"}) == 1
    assert not (tmp_path / "marks").exists()


@needs_bubblewrap
async def test_an_environment_that_cannot_be_built_is_not_built_again(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", Dockerfile="FROM a\nCOPY missing.txt /a\n")
    runner = LocalRunner(["bash", "-c", SOLVE])
    read = read_task(task)
    errors = await asyncio.gather(*(runner.attempt(read, make_session()) for _ in range(2)), return_exceptions=True)
    (task / "environment" / "missing.txt").write_text("now it is there")
    errors += await asyncio.gather(runner.attempt(read, make_session()), return_exceptions=True)
    assert [str(error).partition(": ")[2] for error in errors] == [
        "COPY missing.txt must name files in its environment folder, and finds none"
    ] * 3
    assert len({id(error) for error in errors}) == 3


@needs_bubblewrap
async def test_an_instruction_that_is_refused_is_not_left_out_in_a_task_that_nobody_checked(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "task", Dockerfile="FROM a\nRUN make\n"))
    with pytest.raises(InvalidInputError, match="has RUN 'make' in its Dockerfile"):
        await LocalRunner(["bash"]).solve(task)
    with pytest.raises(InvalidInputError, match="has RUN 'make' in its Dockerfile"):
        await LocalRunner(["bash"]).attempt(task, make_session())


@needs_bubblewrap
@pytest.mark.parametrize(
    ("dockerfile", "run", "words"),
    [
        ("RUN make", RunInstructions.REFUSE, "has RUN 'make' in its Dockerfile"),
        ("WORKDIR /usr/src/app", RunInstructions.REFUSE, "has WORKDIR /usr/src/app, a folder of this machine's own"),
        ("COPY words.txt /etc/words", RunInstructions.REFUSE, "has COPY /etc/words, a folder of this machine's own"),
        ("COPY missing.txt /a", RunInstructions.REFUSE, "COPY missing.txt must name files in its environment folder"),
        ("COPY ../task.toml /a", RunInstructions.REFUSE, "COPY ../task.toml must name files in its environment"),
        ("RUN echo oops; exit 7", RunInstructions.SANDBOX, "RUN 'echo oops; exit 7' exited with 7: oops"),
    ],
)
async def test_a_dockerfile_that_cannot_be_followed_is_an_error(
    tmp_path: Path, dockerfile: str, run: RunInstructions, words: str
) -> None:
    task = write_task(tmp_path / "task", Dockerfile=f"FROM a\n{dockerfile}\n")
    with pytest.raises((InvalidInputError, TaskError)) as raised:
        await attempt(task, SOLVE, run=run)
    assert words in str(raised.value)


async def test_a_command_that_cannot_be_started_leaves_no_socket_open(tmp_path: Path) -> None:
    command = Command(
        words=("true",), root=tmp_path, workdir="/a/../b", variables={}, output=tmp_path / "o", errors=tmp_path / "o"
    )
    already_open = find_open_files()
    with pytest.raises(TaskError, match=r"'/a/\.\./b' must be a path without \.\.") as raised:
        await run_command(command, open_sandbox(SandboxKind.NONE), ProcessLimits(), timeout_s=10)
    assert raised.tb is not None  # it keeps the frames of the failed call
    assert find_open_files() <= already_open
