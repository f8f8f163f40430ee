"""Attempts of terminal tasks on this machine: when the tests come, what is no reward, and that no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.terminal_attempts import SOLVE, attempt, read_log
from support.terminal_tasks import needs_bubblewrap, write_task
from unbroken.errors import TaskError
from unbroken.integrations.harbor.local.processes import ProcessLimits


@needs_bubblewrap
async def test_an_agent_that_solves_the_task_gets_the_reward_and_its_output_is_kept(task: Path) -> None:
    outcome = await attempt(task, f"echo $GREETING; pwd; echo oops >&2; {SOLVE}")
    assert (outcome.reward, outcome.metrics) == (1.0, {"agent_timed_out": 0.0, "agent_failed": 0.0})
    assert read_log(task) == "hello task\n/app\n"
    assert read_log(task, "agent.err") == "oops\n"
    assert (task.parent / "logs" / "one" / "root" / "app" / "more.txt").read_text() == "four\n"


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
        (
            "echo x > /logs/verifier/reward.txt",
            "its tests wrote reward.txt 'x\\n': a reward must be a finite number, got 'x'",
        ),
        ("echo nan > /logs/verifier/reward.txt", "a reward must be a finite number, got 'nan'"),
        ("echo null > /logs/verifier/reward.json", "a reward must be a finite number, got None"),
        ("echo '{\"reward\": [1]}' > /logs/verifier/reward.json", "a reward must be a finite number, got [1]"),
        ("printf '1%0400d' 0 > /logs/verifier/reward.json", "a reward must be a finite number, got 1000"),
        ("printf '[%.0s' {1..90000} > /logs/verifier/reward.json", "its tests wrote reward.json '[[["),
        ("ln -s reward.txt /logs/verifier/reward.txt", "must write /logs/verifier/reward.txt"),
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
def test_a_killed_runner_leaves_no_process(tmp_path: Path, mark: int) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from support.terminal_attempts import attempt; "
        f"asyncio.run(attempt(Path(sys.argv[1]), 'sleep {mark}1'))"
    )
    task = write_task(tmp_path / "task")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(tmp_path),  # where its folders stay behind
    }
    process = subprocess.Popen([sys.executable, "-c", code, str(task)], env=variables)
    deadline = time.monotonic() + 60
    while not _list_sleeping(mark):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    assert _list_sleeping(mark) == []
