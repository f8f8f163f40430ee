"""Agents that are known by name: their configuration, a copy of a folder to work in, and a check that is the reward."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.gateways import running_gateway, scripted
from support.known_agents import install_codex, install_engine
from support.waits import wait_until
from unbroken.client import AsyncClient
from unbroken.errors import InvalidInputError
from unbroken.rollout.agents.command import Check, CommandAgent, Workspace, check_program
from unbroken.rollout.agents.container import Image
from unbroken.rollout.agents.known import KNOWN_AGENTS
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.agents.session import AgentSession
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.server.process import host_app
from unbroken.types import SamplingParams

SAYS = "$ printf '%s' changed > notes.txt<|im_end|>"
CHANGED = (sys.executable, "-c", "import sys; sys.exit(open('notes.txt').read() != 'changed')")
ROW = {"prompt": "Change it.", "answer": "the secret answer"}
ODD_TASKS = ("Fix it.", "--help", 'a "quote" \\ and {model} {api_key}', "two\nlines", "-")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_codex(tmp_path / "bin", monkeypatch)
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "notes.txt").write_text("as it was")
    (folder / "runs" / "old.log").write_text("of the run")
    return folder


def codex(workspace: Path, check: tuple[str, ...] = CHANGED, **fields: Any) -> CommandAgent:
    own = {
        "known": KNOWN_AGENTS["codex"],
        "instruction": "Change it.",
        "workspace": Workspace(folder=workspace, leave_out=workspace / "runs"),
        "check": Check(command=check, timeout_s=30),
        "logs": workspace.parent / "logs",
    }
    return CommandAgent(**{**own, **fields})


async def attempt(
    folder: Path, agent: CommandAgent, *, limits: Limits | None = None, num: int = 1, says: str = SAYS
) -> tuple[Trajectory, ...]:
    async with (
        running_gateway(scripted(says), folder / "store") as gateway,
        host_app(gateway.app) as url,
        AsyncClient(url) as client,
    ):
        group = await run_agent_group(
            agent,
            num,
            gateway=client.sessions,
            task=ROW,
            sampling=SamplingParams(max_tokens=100),
            limits=limits or Limits(),
        )
    return group.trajectories


def make_session() -> AgentSession:
    return AgentSession(
        session_id="s",
        api_key="the-key",
        openai_base_url="http://h/s/the-key/v1",
        anthropic_base_url="http://h/s/the-key",
        model='a "model"',
        task=ROW,
    )


async def test_a_known_agent_works_in_a_copy_and_its_check_is_the_reward(tmp_path: Path, workspace: Path) -> None:
    first, second = await attempt(tmp_path, codex(workspace), num=2)
    assert (first.status, first.reward, first.reward_parts) == (TrajectoryStatus.COMPLETED, 1.0, {"agent_failed": 0.0})
    assert (second.reward, second.messages[0]["content"]) == (1.0, "Change it.")
    assert (workspace / "notes.txt").read_text() == "as it was"
    (failed,) = await attempt(tmp_path / "2", codex(workspace), says="It is done.<|im_end|>")
    assert (failed.status, failed.reward) == (TrajectoryStatus.COMPLETED, 0.0)


async def test_a_known_agent_gets_its_own_configuration_and_nothing_else(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row may have the expected answer, and a second provider's key would open a second provider."""
    monkeypatch.setenv("HF_TOKEN", "mine")
    await attempt(tmp_path, codex(workspace, environment={"LEVEL": "3"}))
    (log,) = (path for path in (tmp_path / "logs").glob("*.log") if ".check" not in path.name)
    found = json.loads(log.read_text().splitlines()[0])
    assert found["words"] == ["exec", "--skip-git-repo-check", "--", "Change it."]
    assert found["here"] == ["notes.txt"], "the run's output is not copied"
    variables = found["variables"]
    assert variables["HOME"] != os.environ["HOME"]
    assert variables["LEVEL"] == "3"
    assert not {"OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "UNBROKEN_TASK", "HF_TOKEN"} & variables.keys()
    assert ROW["answer"] not in json.dumps(variables)
    assert "unbroken-agent-" in variables["HOME"]


async def test_a_check_gets_the_row_and_no_key_and_its_output_is_kept(tmp_path: Path, workspace: Path) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    await attempt(tmp_path, codex(workspace, (sys.executable, "-c", code)))
    (log,) = (tmp_path / "logs").glob("*.check.log")
    variables = json.loads(log.read_text())
    assert json.loads(variables["UNBROKEN_TASK"]) == ROW
    assert variables["HOME"] == os.environ["HOME"]
    assert not [name for name, value in variables.items() if "ub-session" in value or name.endswith("API_KEY")]


@pytest.mark.parametrize("name", KNOWN_AGENTS)
@pytest.mark.parametrize("task", ODD_TASKS)
def test_the_key_is_in_files_and_variables_and_only_the_task_in_words(tmp_path: Path, name: str, task: str) -> None:
    agent = KNOWN_AGENTS[name]
    words, variables = agent.start(make_session(), instruction=task, home=tmp_path)
    assert words[0] == agent.program
    assert sum(word == task or word.endswith(f"={task}") for word in words) == 1
    assert words[-1].endswith(task)
    assert words[-1] != task or words[-2] == "--", "a task that begins with a dash is no option"
    assert "the-key" not in " ".join(words)
    texts = {file: (tmp_path / file).read_text() for file in agent.files}
    for file, text in texts.items():
        (tomllib if file.endswith(".toml") else json).loads(text)
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o600
    assert "the-key" in " ".join([*texts.values(), *variables.values()])
    assert variables["HOME"] == str(tmp_path)


def test_what_is_missing_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, agent in KNOWN_AGENTS.items():
        with pytest.raises(InvalidInputError) as raised:
            agent.check(name)
        assert f"got {name!r}: there is no program {agent.program} on PATH" in str(raised.value)
        assert str(raised.value).endswith(f"Install it: {agent.install}")
    install_codex(tmp_path / "bin", monkeypatch)
    KNOWN_AGENTS["codex"].check("codex")


async def test_an_agent_that_failed_without_a_turn_is_an_error_and_after_a_turn_its_check_counts(
    tmp_path: Path, workspace: Path
) -> None:
    """A reward of 0 in every rollout would hide that the agent never worked."""
    (unasked,) = await attempt(tmp_path, codex(workspace, instruction="Fail."))
    assert (unasked.status, unasked.reward) == (TrajectoryStatus.FAILED, None)
    assert "codex exited with 1: codex: no such model" in str(unasked.error)
    (asked,) = await attempt(tmp_path / "2", codex(workspace, instruction="Fail after a turn."))
    assert (asked.status, asked.reward) == (TrajectoryStatus.COMPLETED, 1.0)
    assert asked.reward_parts == {"agent_failed": 1.0}


async def test_a_check_that_hangs_is_ended_and_fails(tmp_path: Path, workspace: Path) -> None:
    agent = codex(workspace, check=())
    agent = replace(agent, check=Check(command=("sleep", "60"), timeout_s=0.2))
    started = time.perf_counter()
    (hung,) = await attempt(tmp_path, agent)
    assert (hung.status, hung.reward) == (TrajectoryStatus.COMPLETED, 0.0)
    assert time.perf_counter() - started < 30


async def test_a_copy_and_a_check_take_nothing_of_the_agents_time(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Workspace.copy

    def copy_slowly(self: Workspace, target: Path) -> None:
        time.sleep(2.5)
        copy(self, target)

    monkeypatch.setattr(Workspace, "copy", copy_slowly)
    slow = (sys.executable, "-c", "import time; time.sleep(2.5)")
    (found,) = await attempt(tmp_path, codex(workspace, slow), limits=Limits(timeout_s=2))
    assert (found.status, found.reward) == (TrajectoryStatus.COMPLETED, 1.0)


async def test_a_check_in_the_copy_that_the_agent_removed_fails_and_one_that_is_not_there_is_the_users_error(
    tmp_path: Path, workspace: Path
) -> None:
    (workspace / "check.sh").write_text("#!/bin/sh\nexit 0\n")
    (workspace / "check.sh").chmod(0o755)
    agent = codex(workspace, ("./check.sh",))
    assert agent.check is not None
    check_program(agent.check.command, field="agent.check", workspace=agent.workspace)
    (kept,) = await attempt(tmp_path, agent)
    (removed,) = await attempt(tmp_path / "2", agent, says="$ rm check.sh<|im_end|>")
    assert (kept.reward, removed.reward, removed.status) == (1.0, 0.0, TrajectoryStatus.COMPLETED)
    (failed,) = await attempt(tmp_path / "3", codex(workspace, ("no-such-program",)))
    assert "agent.check must be a program, got 'no-such-program'" in str(failed.error)
    for word, where in (("no-such-program", "on PATH"), ("./no.sh", "in the workspace"), ("/no/sh", "at this path")):
        with pytest.raises(InvalidInputError, match=f"agent.check must begin with a program, got '{word}': .*{where}"):
            check_program([word], field="agent.check", workspace=agent.workspace)


def _make_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _make_worktree(folder: Path) -> None:
    (folder / ".git").write_text("gitdir: /elsewhere")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_make_pipe, "agent.workspace must be a folder that can be copied, got .*pipe.*named pipe"),
        (_make_worktree, "agent.workspace must not be a worktree or submodule of git"),
        (
            lambda folder: folder.rename(folder.parent / "gone"),
            "agent.workspace must be a folder, got .*no such folder",
        ),
    ],
)
def test_a_workspace_that_cannot_be_copied_is_refused(
    workspace: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    spoil(workspace)
    with pytest.raises(InvalidInputError, match=words):
        Workspace(folder=workspace, leave_out=tmp_path / "runs").copy(tmp_path / "copy")


def test_a_copy_has_links_as_links_and_what_programs_may_execute(workspace: Path, tmp_path: Path) -> None:
    (workspace / "link").symlink_to("notes.txt")
    (workspace / "run").write_text("")
    (workspace / "run").chmod(0o755)
    Workspace(folder=workspace, leave_out=tmp_path / "elsewhere").copy(tmp_path / "copy")
    assert os.readlink(tmp_path / "copy" / "link") == "notes.txt"  # noqa: PTH115
    assert os.access(tmp_path / "copy" / "run", os.X_OK)
    assert (tmp_path / "copy" / "runs" / "old.log").exists()


async def test_an_attempt_that_is_cancelled_while_its_workspace_is_copied_leaves_no_folder(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is removed while another thread fills it stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    targets: list[Path] = []

    def copy(self: Workspace, target: Path) -> None:
        for number in range(50):
            (target / str(number)).mkdir(parents=True)  # as shutil.copytree makes folders
            targets.append(target / str(number))
            time.sleep(0.005)

    monkeypatch.setattr(Workspace, "copy", copy)
    work = asyncio.create_task(codex(workspace)(make_session()))
    await wait_until(lambda: bool(targets))
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled()
    await wait_until(lambda: len(targets) == 50)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the variables of processes")
async def test_what_left_the_process_group_of_an_agent_is_ended_before_its_check(workspace: Path) -> None:
    """Cline's daemon went on in a group of its own, and wrote into the home that was being removed."""
    loop = "import pathlib, time\nwhile True: pathlib.Path('alive').touch(); time.sleep(0.01)"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {loop!r}], start_new_session=True)\n"
        "while not pathlib.Path('alive').exists(): time.sleep(0.01)"
    )
    check = (
        "import pathlib, sys, time\n"
        "pathlib.Path('alive').unlink(); time.sleep(0.3); sys.exit(pathlib.Path('alive').exists())"
    )
    agent = CommandAgent(
        command=[sys.executable, "-c", code], check=Check(command=(sys.executable, "-c", check), timeout_s=30)
    )
    found = await agent(make_session())
    assert not isinstance(found, float | None)
    assert (found.reward, found.failure) == (1.0, None)


async def test_a_command_works_in_a_copy_too(workspace: Path) -> None:
    code = (
        "import pathlib; assert pathlib.Path('notes.txt').read_text(); pathlib.Path('notes.txt').write_text('changed')"
    )
    command = CommandAgent(
        command=[sys.executable, "-c", code],
        workspace=Workspace(folder=workspace, leave_out=workspace / "runs"),
        check=Check(command=CHANGED, timeout_s=30),
    )
    found = await command(make_session())
    assert not isinstance(found, float | None)
    assert (found.reward, found.failure) == (1.0, None)
    assert (workspace / "notes.txt").read_text() == "as it was"


@pytest.mark.parametrize("engine", ["docker", "podman"])
async def test_an_agent_and_its_check_run_in_containers_of_an_image(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The check is a file beside the workspace: it can be read inside. Values are in no words, which others can see."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}")  # no docker of this machine
    monkeypatch.setenv("MY_SECRET", "of the user")
    log = install_engine(tmp_path / "bin", engine, monkeypatch)
    check = tmp_path / "check.py"
    check.write_text("import os, sys; print(sorted(os.environ)); sys.exit(open('notes.txt').read() != 'changed')")
    image = Image.find("box")
    (found,) = await attempt(tmp_path, codex(workspace, (Path(sys.executable).name, str(check)), image=image))
    assert (found.status, found.reward) == (TrajectoryStatus.COMPLETED, 1.0), found.error
    inspect, agent, removed, checked, removed_too = (json.loads(line) for line in log.read_text().splitlines())
    assert (inspect[-1], agent[0], checked[0]) == ("box", "run", "run")
    assert [removed, removed_too] == [["rm", "--force", each[each.index("--name") + 1]] for each in (agent, checked)]
    assert agent[agent.index("--network") + 1] == "host"
    mounts = [[part for part in each if part.startswith("type=bind")] for each in (agent, checked)]
    assert [len(each) for each in mounts] == [2, 2]  # the copy and the home; the copy and the check
    assert mounts[1][1] == f"type=bind,source={check},target={check},readonly"
    assert "the-key" not in str([agent, checked])
    (output,) = (tmp_path / "logs").glob("*[0-9a-f].log")
    told = json.loads(output.read_text())["variables"]
    assert f"HOME={told['HOME']}" in agent
    assert ("OPENAI_API_KEY" in told, "MY_SECRET" in told) == (True, False)
    (checked_with,) = (tmp_path / "logs").glob("*.check.log")
    assert "UNBROKEN_TASK" in checked_with.read_text()
    assert "OPENAI_API_KEY" not in checked_with.read_text()


async def test_a_container_that_cannot_be_started_is_the_users_error_and_no_reward(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path / "bin", "docker", monkeypatch)
    (found,) = await attempt(tmp_path, codex(workspace, image=Image.find("box"), environment={"BROKEN": "1"}))
    assert (found.status, found.reward) == (TrajectoryStatus.FAILED, None)
    assert "agent.image must be an image that can be started, got 'box': no room" in str(found.error)


async def test_an_image_without_the_agent_is_named_with_what_installs_it(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path / "bin", "docker", monkeypatch)
    known = replace(KNOWN_AGENTS["codex"], program="sh", words=("-c", "exit 127"))
    (found,) = await attempt(tmp_path, codex(workspace, image=Image.find("box"), known=known))
    assert found.status is TrajectoryStatus.FAILED
    assert "The image must have it: npm install -g @openai/codex" in str(found.error)


async def test_a_container_is_removed_when_its_attempt_is_cut_off(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install_engine(tmp_path / "bin", "docker", monkeypatch)
    known = replace(KNOWN_AGENTS["codex"], program="sleep", words=("60",))
    agent = codex(workspace, image=Image.find("box"), known=known)
    (found,) = await attempt(tmp_path, agent, limits=Limits(timeout_s=2.0))
    assert found.status is TrajectoryStatus.TIMEOUT
    assert [json.loads(line)[0] for line in log.read_text().splitlines()] == ["image", "run", "rm"]


def test_an_image_that_is_not_there_and_a_machine_without_engines_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="needs docker or podman, and neither is on PATH, got 'box'"):
        Image.find("box")
    for engine in ("docker", "podman"):
        install_engine(tmp_path / "bin", engine, monkeypatch)
    with pytest.raises(InvalidInputError, match=r"got 'other' \(docker: no such image: other; podman: "):
        Image.find("other")
    with pytest.raises(InvalidInputError, match="name of an image, got '--privileged'"):
        Image.find("--privileged")


def test_the_page_of_the_gateway_has_each_known_agent() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text("utf-8")
    for name, agent in KNOWN_AGENTS.items():
        assert f"| `{name}` | `{agent.program}` | `{agent.install}` | {agent.dialect} |" in page
