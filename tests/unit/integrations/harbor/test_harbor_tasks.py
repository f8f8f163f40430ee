"""Terminal tasks read from folders: each field and instruction is honoured, noted, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.terminal_tasks import INSTRUCTION, TASK_TOML, needs_bubblewrap, write_task
from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor import (
    LocalRunner,
    TerminalConfig,
    TerminalTasks,
    find_task_folders,
    read_task,
)
from unbroken.integrations.harbor.dockerfile import DEFAULT_PATH, Copy, Run
from unbroken.integrations.harbor.fields import NetworkMode
from unbroken.integrations.harbor.task import describe_files

FULL = """
version = "1.0"
source = "here"
artifacts = ["/app/out"]
[task]
name = "sums/count"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 30
user = "root"
network_mode = "no-network"
[verifier]
timeout_sec = 20.5
env = { JUDGE = "${KEY}", NAME = "${MISSING:-none}" }
environment_mode = "shared"
[environment]
build_timeout_sec = 10
cpus = 2
memory_mb = 2048
gpus = 0
os = "Linux"
env = { A = "1" }
workdir = "/work"
mcp_servers = []
[solution]
env = { B = "2" }
"""


def test_each_field_is_honoured_or_noted(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "t", task_toml=FULL), host={"KEY": "secret"})
    fields = task.fields
    assert (task.name, task.instruction, task.workdir) == ("sums/count", INSTRUCTION, "/work")
    assert (fields.agent_timeout_s, fields.verifier_timeout_s, fields.build_timeout_s) == (30.0, 20.5, 10.0)
    assert (fields.agent_network, fields.verifier_network) == (NetworkMode.NO_NETWORK, NetworkMode.PUBLIC)
    assert task.variables == {"PATH": DEFAULT_PATH, "GREETING": "hello task", "A": "1"}
    assert fields.verifier_variables == {"JUDGE": "secret", "NAME": "none"}
    assert fields.solution_variables == {"B": "2"}
    assert fields.metadata == {"difficulty": "easy"}
    assert task.notes == (
        'artifacts are not collected: keep = "all" keeps all files of an attempt',
        "environment.cpus is not enforced",
        "environment.memory_mb is not enforced",
        "FROM ubuntu:24.04: the programs are this machine's",
    )


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\ndocker_image = "a/b"', "environment.docker_image"),
        ('[environment]\nos = "windows"', "environment.os"),
        ('[environment]\nnetwork_mode = "allowlist"', "environment.network_mode"),
        ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck"),
        ('[[environment.mcp_servers]]\nname = "a"', "environment.mcp_servers"),
        ('[agent]\nuser = "someone"', "agent.user"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode"),
        ('[[steps]]\nname = "one"', "steps"),
        ("[environment]\ndisk_speed = 3", "environment.disk_speed"),
        ("new_field = 3", "new_field"),
    ],
)
def test_a_field_that_asks_for_more_is_refused_by_name_unless_it_is_accepted(
    tmp_path: Path, lines: str, name: str
) -> None:
    folder = write_task(tmp_path / "t", task_toml=lines)
    with pytest.raises(InvalidInputError, match=rf"has {name}: .* environment_arguments.accept = \['{name}'\]"):
        read_task(folder)
    assert any(note.startswith(f"{name} is left out, as accepted") for note in read_task(folder, accept=[name]).notes)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"task_toml": "x ="}, "task.toml must be a TOML file"),
        ({"task_toml": 'schema_version = "2.0"'}, "must have schema version 1, got '2.0'"),
        (
            {"task_toml": "[agent]\ntimeout_sec = -1"},
            "agent.timeout_sec must be a finite number of seconds > 0, got -1",
        ),
        ({"task_toml": "[verifier]\nenv = { A = 1 }"}, "verifier.env must be a table of texts"),
        ({"task_toml": '[environment]\nenv = { A = "${K}" }'}, "set the environment variable K"),
        ({"task_toml": '[environment]\nworkdir = "app"'}, "environment.workdir must be an absolute path, got 'app'"),
        ({"task_toml": '[agent]\nnetwork_mode = "lan"'}, "must be one of public, no-network and allowlist, got 'lan'"),
        ({"instruction_md": "<!-- canary -->\n"}, "instruction.md must have a text"),
        (
            {"task.yaml": "instruction: x"},
            "the older form of terminal-bench, task.yaml: convert it by `harbor task mig",
        ),
        ({"trajectory.json": "{}"}, "has trajectory.json"),
        ({"environment/docker-compose.yaml": ""}, "has environment/docker-compose.yaml"),
        ({"Dockerfile": "FROM a\nFROM b"}, "several stages"),
        ({"Dockerfile": "FROM a\nCOPY --from=b /x /y"}, "has COPY --from"),
        ({"Dockerfile": "FROM a\nADD https://a.b/c /y"}, "has ADD"),
        ({"Dockerfile": "FROM a\nUSER joe"}, "has USER"),
        ({"Dockerfile": "FROM a\nENTRYPOINT x"}, "has ENTRYPOINT"),
        ({"Dockerfile": "FROM a\nENV A='x"}, "its Dockerfile has ENV A='x, which cannot be read: No closing quotation"),
        ({"Dockerfile": "FROM a\nENV"}, "its Dockerfile has ENV without anything after it"),
        ({"Dockerfile": "FROM a\nENV A=${B:+c}"}, "its Dockerfile has ${B:+c}, a form of a variable that is not read"),
        ({"task_toml": '[environment]\nallow_internet = "no"'}, "allow_internet must be true or false, got 'no'"),
        ({"Dockerfile": "FROM a\nRUN <<EOF\nls\nEOF"}, "a here-document"),
    ],
)
def test_what_cannot_be_read_or_had_is_refused_by_name(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        read_task(write_task(tmp_path / "t", **files))
    assert words in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("name", ["tests/test.sh", "environment/Dockerfile", "instruction.md", "task.toml"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_task(tmp_path / "t")
    (folder / name).unlink()
    with pytest.raises(InvalidInputError, match=Path(name).name):
        read_task(folder)


@pytest.mark.parametrize("name", ["tests/keys", "solution/keys", "environment/data/keys", "instruction.md"])
def test_a_link_that_leads_out_of_the_task_is_refused(tmp_path: Path, name: str) -> None:
    """It would bring files of this machine into the sandbox."""
    folder = write_task(tmp_path / "t")
    (tmp_path / "keys").write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "keys")
    with pytest.raises(InvalidInputError, match=f"{name} must not be a link out of the task's folder"):
        read_task(folder)


def test_a_dockerfile_becomes_steps_with_their_folder_and_variables(tmp_path: Path) -> None:
    text = """
# syntax=docker/dockerfile:1
ARG SUITE=stable
FROM python:3.13 AS base
ARG VERSION=3
ARG SUITE
ENV NAME=value OTHER="two words"
ENV OLD form of it
ENV PATH=/opt/bin:$PATH
WORKDIR /app
WORKDIR sub
COPY --chmod=755 a.txt b.txt ./
COPY ["c.txt", "/data/${NAME}-${VERSION}.txt"]
RUN make \\
    # a comment between


    all
RUN\t["ls", "-l"]
LABEL a=b
EXPOSE 80
CMD ["bash"]
RUN last \\"""
    plan = read_task(write_task(tmp_path / "t", Dockerfile=text)).plan
    copied, renamed, make, listed, last = plan.steps
    assert copied == Copy(sources=("a.txt", "b.txt"), destination="/app/sub/", mode=0o755)
    assert renamed == Copy(sources=("c.txt",), destination="/data/value-3.txt")
    assert isinstance(make, Run)
    assert (make.words, make.workdir) == (("/bin/sh", "-c", "make all"), "/app/sub")
    assert (make.variables["VERSION"], make.variables["SUITE"]) == ("3", "stable")
    assert isinstance(listed, Run)
    assert listed.words == ("ls", "-l")
    assert isinstance(last, Run)
    assert last.words == ("/bin/sh", "-c", "last")
    assert (plan.workdir, plan.variables["OTHER"], plan.variables["OLD"]) == ("/app/sub", "two words", "form of it")
    assert plan.variables["PATH"] == f"/opt/bin:{DEFAULT_PATH}"
    assert "VERSION" not in plan.variables


def test_a_folder_of_tasks_or_of_one_task(tmp_path: Path) -> None:
    for name in ("sort-b", "sort-a", "count"):
        write_task(tmp_path / name)
    (tmp_path / "README.md").write_text("no task")
    assert [folder.name for folder in find_task_folders(tmp_path)] == ["count", "sort-a", "sort-b"]
    assert [folder.name for folder in find_task_folders(tmp_path, names=["sort-*"])] == ["sort-a", "sort-b"]
    assert find_task_folders(tmp_path / "count") == [tmp_path / "count"]
    for folder, words in ((tmp_path / "none", "no such folder"), (tmp_path / "count" / "tests", "has no task")):
        with pytest.raises(InvalidInputError, match=words):
            find_task_folders(folder)
    with pytest.raises(InvalidInputError, match="no task with a name like x"):
        find_task_folders(tmp_path, names=["x"])


def test_a_digest_says_whether_a_file_of_a_task_changed(tmp_path: Path) -> None:
    first, second = write_task(tmp_path / "a"), write_task(tmp_path / "b")
    assert describe_files(first) == describe_files(second)
    write_task(second, task_toml=TASK_TOML + "\n")
    assert describe_files(first) != describe_files(second)


@needs_bubblewrap
def test_tasks_are_split_for_evaluation_and_their_time_must_fit(tmp_path: Path) -> None:
    for name in ("data/a", "data/b", "data/held-c", "other/d"):
        write_task(tmp_path / name)

    def split(**config: Any) -> list[int]:
        made = TerminalConfig(**config)
        tasks = TerminalTasks(tmp_path / "data", LocalRunner(["bash"], config=made), made, max_attempt_s=600)
        return [len(tasks.rows(evaluation=evaluation)) for evaluation in (False, True)]

    assert split() == [3, 3]
    assert split(evaluation_tasks=("held-*",)) == [2, 1]
    assert split(evaluation=Path("../other"), tasks=("a",)) == [1, 1]
    with pytest.raises(InvalidInputError, match="evaluation_tasks must leave tasks to train on"):
        split(evaluation_tasks=("*",))
    config = TerminalConfig()
    tasks = TerminalTasks(tmp_path / "data", LocalRunner(["bash"], config=config), config, max_attempt_s=60)
    with pytest.raises(InvalidInputError, match=r"rollouts\.limits\.timeout_s must be longer than the agent of task"):
        tasks.rows(evaluation=False)


@needs_bubblewrap
def test_what_does_not_hold_here_is_logged_once_for_all_tasks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = LocalRunner(["bash"])
    for name in ("a", "b"):
        (write_task(tmp_path / name) / "solution" / "solve.sh").unlink()
        runner.read(tmp_path / name)
    assert caplog.messages == [
        "task a, and others like it: FROM ubuntu:24.04: the programs are this machine's",
        "task a, and others like it: no solution/solve.sh: nothing shows that it can be solved here",
    ]
