"""Processes of a part: kept running, explained, and gone with whoever started them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.waits import wait_until
from unbroken.cluster.processes import Command, Kind, Runner, reserve_port

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps({"policy_version": 5}).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Stands in for `unbroken serve`."""


class Script(Command):
    """A Python script in place of `unbroken`."""

    def make_words(self, python: str) -> list[str]:
        return [python, "-c", *self.words]


def make_runner(folder: Path, kind: Kind = Kind.ENGINE, **options: float) -> Runner:
    return Runner("part-0", kind, folder, **options)


def script(folder: Path, *words: str, **values) -> Script:
    return Script(words=words, log=folder / "log", **values)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_serves_until_it_is_killed_or_stopped_and_serves_again_at_its_address(tmp_path):
    with reserve_port("127.0.0.1") as held:
        port, runner = held.getsockname()[1], make_runner(tmp_path)
        url, found = f"http://127.0.0.1:{port}", []
        for number, ends in ((1, ["was killed by SIGKILL"]), (2, [])):
            commands = [script(tmp_path, SERVER, str(port))]
            thread = threading.Thread(target=lambda: found.append(runner.run(number, commands, url)))  # noqa: B023
            thread.start()
            asyncio.run(wait_until(lambda: runner.look().state == "serves"))
            assert (runner.look().version, runner.look().url) == (5, url)
            pid = runner.look().pid
            if ends:
                os.kill(pid, signal.SIGKILL)
            else:
                runner.stop(number)
            thread.join(60)
            assert found.pop() == ends
            assert (runner.look().state, is_alive(pid)) == ("waits", False)
        assert runner.run(2, commands, url) == []  # it was stopped before it began


def test_a_command_that_fails_is_explained_by_the_last_line_of_its_log(tmp_path):
    words = "import sys; print('unbroken: no such model', file=sys.stderr); print('x'); sys.exit(1)"
    runner = make_runner(tmp_path)
    assert runner.run(1, [script(tmp_path, words)]) == ["ended with status 1: no such model"]
    assert runner.run(2, [script(tmp_path, "")]) == ["ended with status 0"]  # only trainers may end


def test_a_server_that_does_not_answer_is_killed(tmp_path):
    runner = make_runner(tmp_path, start_s=2.0)
    with reserve_port("127.0.0.1") as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert runner.run(1, [script(tmp_path, "import time; time.sleep(60)")], url) == ["did not answer for 2 s"]


def test_all_of_a_process_is_killed_when_the_one_that_started_it_is_gone(tmp_path):
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    script = (
        "import sys, time; from pathlib import Path; from unbroken.cluster.processes import Command, Process\n"
        "class Script(Command):\n    def make_words(self, python): return [python, '-c', *self.words]\n"
        f"here = Path(sys.argv[1]); process = Process(Script(words=[{child!r}], log=here / 'log'), here)\n"
        "print(process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(parent.stdout.readline())]
    log = tmp_path / "log"
    asyncio.run(wait_until(lambda: log.exists() and log.read_text().endswith("\n")))
    pids.append(int(log.read_text()))
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    asyncio.run(wait_until(lambda: not any(map(is_alive, pids))))


def test_a_rank_that_fails_ends_the_others_and_all_may_end_well(tmp_path):
    words = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    ranks = [script(tmp_path, words, variables={"RANK": f"{rank}"}, name=f"rank {rank}") for rank in range(2)]
    runner = make_runner(tmp_path, Kind.TRAINERS)
    assert runner.run(1, ranks) == ["rank 1 ended with status 3"]
    assert runner.run(2, [script(tmp_path, "print('well')")]) == []
    assert (tmp_path / "log").read_text().endswith("well\n")


def test_a_reserved_port_is_bound_by_a_server_and_by_nobody_else():
    with reserve_port("127.0.0.1") as held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(held.getsockname())
        server.listen()
        socket.create_connection(held.getsockname()).close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
