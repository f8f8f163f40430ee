"""Attempts of terminal tasks on this machine: what a sandbox hides, when the tests come, and what is no reward."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.terminal_tasks import DOCKERFILE, needs_bubblewrap, write_task
from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor import Keep, LocalRunner, Network, TerminalConfig, TerminalTasks, read_task
from unbroken.integrations.harbor.local.building import RunInstructions
from unbroken.integrations.harbor.local.processes import ProcessLimits
from unbroken.integrations.harbor.local.sandbox import SandboxKind, find_file, make_folder
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


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "task")


@needs_bubblewrap
async def test_an_agent_that_solves_the_task_gets_the_reward_and_its_output_is_kept(task: Path) -> None:
    outcome = await attempt(task, f"echo $GREETING; pwd; echo oops >&2; {SOLVE}")
    assert (outcome.reward, outcome.metrics) == (1.0, {"agent_timed_out": 0.0, "agent_failed": 0.0})
    assert read_log(task) == "hello task\n/app\n"
    assert read_log(task, "agent.err") == "oops\n"
    assert (task.parent / "logs" / "one" / "root" / "app" / "more.txt").read_text() == "four\n"


@needs_bubblewrap
async def test_a_sandbox_hides_this_machine(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of this machine")
    script = f"""
    ls {task} {Path.home()}/.ssh /work 2>/dev/null && echo sees files
    ls /tests /solution 2>/dev/null && echo sees tests
    touch /usr/bin/x /etc/x 2>/dev/null && echo writes programs
    [ -s /etc/shadow ] && echo sees shadow
    env | grep -q A_SECRET && echo sees variables
    kill -0 {os.getpid()} 2>/dev/null && [ {os.getpid()} -gt 50 ] && echo sees processes
    echo "$(hostname) $(id -u) $HOME $(ls /proc | grep -c '^[0-9]')"
    """
    await attempt(task, script)
    name, user, home, processes = read_log(task).split()
    assert (name, user, home) == ("task", "0", "/root")
    assert int(processes) < 10


@needs_bubblewrap
async def test_a_sandbox_has_the_gateway_and_no_other_network(task: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway, socket.create_server(("127.0.0.1", 0)) as other:
        serving = threading.Thread(target=_answer, args=(gateway, b"hello from outside\n"))
        serving.start()
        address = "/dev/tcp/127.0.0.1"
        script = f"""
        url=${{OPENAI_BASE_URL#http://127.0.0.1:}}; port=${{url%%/*}}
        cat < {address}/$port
        echo x > {address}/{other.getsockname()[1]} && echo reaches other services
        echo x > {address}/{gateway.getsockname()[1]} && echo reaches the gateway past the bridge
        ls /sys/class/net 2>/dev/null; cat /proc/net/dev | grep -v lo: | tail -n +3
        echo $OPENAI_API_KEY $OPENAI_BASE_URL $ANTHROPIC_BASE_URL
        """
        await attempt(task, script, port=gateway.getsockname()[1])
        serving.join(10)
    here = "http://127.0.0.1:41417/s/one"
    assert read_log(task) == f"hello from outside\nthe-key {here}/v1 {here}\n"


def _answer(server: socket.socket, text: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(text)


@needs_bubblewrap
@pytest.mark.parametrize(("mode", "reaches"), [("public", True), ("no-network", False)])
async def test_with_the_tasks_network_a_public_task_reaches_this_machine(
    tmp_path: Path, mode: str, reaches: bool
) -> None:
    task = write_task(tmp_path / "task", task_toml=f'[environment]\nnetwork_mode = "{mode}"')
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = f"echo x > /dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo reached"
        await attempt(task, f"{script}; true", network=Network.TASK)
    assert read_log(task) == ("reached\n" if reaches else "")


@needs_bubblewrap
async def test_an_agent_that_takes_too_long_is_ended_with_all_its_processes_and_verified(task: Path, mark: int) -> None:
    started = time.monotonic()
    outcome = await attempt(
        task,
        f"{SOLVE}; (setsid sleep {mark}1 &); (trap '' TERM; sleep {mark}2) & sleep {mark}3",
        agent_timeout_s=1.0,
    )
    assert time.monotonic() - started < 20
    assert (outcome.reward, outcome.metrics["agent_timed_out"], outcome.metrics["agent_failed"]) == (1.0, 1.0, 0.0)
    await asyncio.sleep(0.2)
    assert _list_sleeping(mark) == []


@pytest.fixture
def mark() -> int:
    """A number of seconds that no other test sleeps."""
    return 10_000_000 + time.time_ns() % 1_000_000


def _list_sleeping(mark: int | str) -> list[str]:
    """The commands `sleep MARK...` that run on this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [command for command in found if command.startswith(f"sleep {mark}")]


@needs_bubblewrap
async def test_a_cancelled_attempt_leaves_no_process(task: Path, mark: int) -> None:
    working = asyncio.create_task(attempt(task, f"(setsid sleep {mark}1 &); sleep {mark}2"))
    for _ in range(200):
        await asyncio.sleep(0.1)
        if _list_sleeping(f"{mark}1"):
            break
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await asyncio.sleep(0.2)
    assert _list_sleeping(mark) == []


@needs_bubblewrap
async def test_what_an_agent_leaves_for_the_tests_does_not_stand(task: Path, tmp_path: Path) -> None:
    """Rewards and tests that it wrote are removed, and links in their place lead nowhere."""
    (tmp_path / "outside").mkdir()
    script = f"""
    echo 1 > /logs/verifier/reward.txt; echo '{{"reward": 1}}' > /logs/verifier/reward.json
    ln -s {tmp_path}/outside /tests; chmod 000 /logs/verifier
    (setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' &)
    """
    outcome = await attempt(task, script)
    assert outcome.reward == 0.0
    assert list((tmp_path / "outside").iterdir()) == []


@needs_bubblewrap
@pytest.mark.parametrize(
    ("test", "words"),
    [
        (
            "exit 3",
            "its tests must write /logs/verifier/reward.txt or reward.json, and exited with 3 without: no output",
        ),
        ("echo broken; exit 1", "exited with 1 without: broken"),
        ("echo x > /logs/verifier/reward.txt", "its tests wrote reward.txt 'x\\n': could not convert"),
        ("echo nan > /logs/verifier/reward.txt", "a reward must be a finite number"),
        ("echo '{\"a\": 1}' > /logs/verifier/reward.json", "it must have 'reward', or environment_arguments.reward"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "must write /logs/verifier/reward.txt"),
        ("sleep 100", "its tests took longer than verifier.timeout_sec, 1 s"),
    ],
)
async def test_tests_that_fail_are_an_error_and_no_reward_of_0(tmp_path: Path, test: str, words: str) -> None:
    task = write_task(tmp_path / "task", test_sh=f"#!/bin/bash\n{test}\n", task_toml="verifier.timeout_sec = 1")
    with pytest.raises(TaskError) as raised:
        await attempt(task, SOLVE)
    assert words in str(raised.value)


@needs_bubblewrap
async def test_a_reward_json_has_the_reward_and_metrics(tmp_path: Path) -> None:
    text = '{"reward": 0.5, "speed": 2, "all": true}'
    task = write_task(tmp_path / "task", test_sh=f"echo '{text}' > /logs/verifier/reward.json; exit 1")
    first = await attempt(task, SOLVE)
    assert (first.reward, first.metrics["speed"], first.metrics["all"]) == (0.5, 2.0, 1.0)
    second = await attempt(task, SOLVE, reward="speed")
    assert (second.reward, second.metrics["reward"]) == (2.0, 0.5)


@needs_bubblewrap
async def test_an_agent_that_fails_before_it_asks_the_model_is_an_error(task: Path) -> None:
    with pytest.raises(TaskError, match="bash exited with 2 before it asked the model: unknown option"):
        await attempt(task, "echo unknown option >&2; exit 2")


@needs_bubblewrap
async def test_an_agent_that_fails_later_is_verified(task: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        outcome = await attempt(task, f"{SOLVE}; : < /dev/tcp/127.0.0.1/41417; exit 4", port=gateway.getsockname()[1])
    assert (outcome.reward, outcome.metrics["agent_failed"]) == (1.0, 1.0)


@needs_bubblewrap
async def test_more_output_than_the_limit_is_dropped_and_the_agent_goes_on(task: Path) -> None:
    outcome = await attempt(task, f"yes | head -c 5000000; {SOLVE}", limits=ProcessLimits(output_bytes=1000))
    assert outcome.reward == 1.0
    assert read_log(task) == "y\n" * 500 + "\n[more than 1000 bytes of output: the rest is not kept]\n"


@needs_bubblewrap
async def test_files_and_memory_have_limits(task: Path) -> None:
    limits = ProcessLimits(file_bytes=1000, memory_bytes=400_000_000)
    await attempt(task, "head -c 5000 /dev/zero > big; wc -c < big; ulimit -v", limits=limits)
    assert read_log(task).split() == ["1000", "390625"]


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


async def test_without_bubblewrap_a_sandbox_is_not_left_out_silently(
    task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInputError, match=r'apt-get install bubblewrap.*environment_arguments.sandbox = "none"'):
        LocalRunner(["/bin/bash"])
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho no namespaces >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(InvalidInputError, match="bwrap must be able to make namespaces, but failed: no namespaces"):
        LocalRunner(["/bin/bash"])


@needs_bubblewrap
def test_a_program_that_the_sandbox_hides_is_refused_with_what_to_do(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text(f"#!{tmp_path}/python\n")
    program.chmod(0o755)
    with pytest.raises(InvalidInputError, match=rf"needs {program}, which the sandbox hides.*readable"):
        LocalRunner([str(program)])
    LocalRunner([str(program)], config=TerminalConfig(readable=(tmp_path,)))
    installed = tmp_path / "tools" / "mini" / "bin" / "mini"
    installed.parent.mkdir(parents=True)
    program.rename(installed)
    program.symlink_to(installed)
    (installed.parent / "python").symlink_to("/usr/bin/env")
    installed.write_text(f"#!{installed.parent}/python\n")
    needed = (tmp_path / "tools" / "mini", program)
    with pytest.raises(InvalidInputError) as raised:
        LocalRunner([str(program)])
    assert str(raised.value).endswith(f"readable = [{', '.join(repr(str(each)) for each in needed)}]")
    LocalRunner([str(program)], config=TerminalConfig(readable=needed))
    with pytest.raises(InvalidInputError, match="must begin with a program, got 'no-such-agent'"):
        LocalRunner(["no-such-agent"])
    with pytest.raises(InvalidInputError, match="readable must name what exists"):
        LocalRunner(["bash"], config=TerminalConfig(readable=(tmp_path / "missing",)))


async def test_without_a_sandbox_paths_begin_with_a_variable(tmp_path: Path) -> None:
    test = 'cat "$UNBROKEN_TASK_ROOT/app/count.txt" > "$UNBROKEN_TASK_ROOT/logs/verifier/reward.txt"'
    task = write_task(tmp_path / "task", test_sh=test)
    script = f"pwd; [ -e ../tests ] && echo sees tests; {SOLVE.replace('/app/', '')}; exit 3"
    outcome = await attempt(task, script, sandbox=SandboxKind.NONE)
    assert (outcome.reward, outcome.metrics["agent_failed"]) == (3.0, 1.0)
    assert read_log(task).endswith("/root/app\n")


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


def test_no_link_is_followed_out_of_a_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "reward.txt").write_text("1")
    (root / "logs").symlink_to(outside)
    assert find_file(root, "/logs/reward.txt") is None
    assert make_folder(root, "/logs/verifier") == root / "logs" / "verifier"
    assert not (outside / "verifier").exists()
    (root / "logs" / "own.txt").write_text("2")
    (root / "logs" / "link.txt").symlink_to("own.txt")
    found = find_file(root, "/logs/link.txt")
    assert found is not None
    assert found.read_text() == "2"
    with pytest.raises(TaskError, match=r"without \.\."):
        make_folder(root, "/logs/../../x")


@needs_bubblewrap
def test_a_killed_runner_leaves_no_process(tmp_path: Path, mark: int) -> None:
    code = (
        "import asyncio, runpy, sys; from pathlib import Path; attempt = runpy.run_path(sys.argv[1])['attempt']; "
        f"asyncio.run(attempt(Path(sys.argv[2]), 'sleep {mark}1'))"
    )
    task = write_task(tmp_path / "task")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(tmp_path),  # where its folders stay behind
    }
    process = subprocess.Popen([sys.executable, "-c", code, __file__, str(task)], env=variables)
    deadline = time.monotonic() + 60
    while not _list_sleeping(mark):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    assert _list_sleeping(mark) == []
