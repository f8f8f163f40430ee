"""The sandbox of terminal tasks: what it hides, which network it has, and which programs it shows."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from support.terminal_attempts import SOLVE, attempt, read_log
from support.terminal_tasks import needs_bubblewrap, write_task
from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor import (
    LocalRunner,
    Network,
    TerminalConfig,
)
from unbroken.integrations.harbor.local.files import find_file, make_folder
from unbroken.integrations.harbor.local.processes import ProcessLimits
from unbroken.integrations.harbor.local.sandbox import Bubblewrap, SandboxKind


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
async def test_files_and_memory_have_limits(task: Path) -> None:
    limits = ProcessLimits(file_bytes=1000, memory_bytes=400_000_000)
    await attempt(task, "head -c 5000 /dev/zero > big; wc -c < big; ulimit -v", limits=limits)
    assert read_log(task).split() == ["1000", "390625"]


@needs_bubblewrap
@pytest.mark.parametrize("has_network", [True, False])
def test_with_a_network_host_names_are_found_by_a_file_that_lies_elsewhere(tmp_path: Path, has_network: bool) -> None:
    """As /etc/resolv.conf is a link into /run, where systemd-resolved is used."""
    found = tmp_path / "run" / "resolv.conf"
    found.parent.mkdir()
    found.write_text("nameserver 127.0.0.53\n")
    (tmp_path / "resolv.conf").symlink_to(found)
    (tmp_path / "root").mkdir()
    sandbox = Bubblewrap(program="bwrap", readable=(), resolver=tmp_path / "resolv.conf")
    words, folder = sandbox.wrap(["cat", str(found)], root=tmp_path / "root", workdir="/", has_network=has_network)
    shown = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False).stdout
    assert shown == ("nameserver 127.0.0.53\n" if has_network else "")


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
async def test_an_agent_that_takes_the_rights_to_folders_is_verified_all_the_same(task: Path) -> None:
    outcome = await attempt(task, f"{SOLVE}; rm /bin; mkdir -p /tests/own /bin/own; chmod 000 /logs /*/own /tests /")
    assert outcome.reward == 1.0


def test_rights_to_a_folder_are_taken_back(tmp_path: Path) -> None:
    (tmp_path / "root" / "logs").mkdir(parents=True)
    for folder in (tmp_path / "root" / "logs", tmp_path / "root"):
        folder.chmod(0o000)
    make_folder(tmp_path / "root", "/logs/verifier")
    for folder in (tmp_path / "root", tmp_path / "root" / "logs"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


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
