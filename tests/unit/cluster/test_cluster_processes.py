"""Processes of a part: kept running, explained, and gone with whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unbroken.cluster.processes import Kind, NodePlace, Part, Ranks, Service, reserve_port

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps({"policy_version": 5}).encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"unbroken serves tiny at http://127.0.0.1:{server.server_port} (x)", flush=True)
server.serve_forever()
"""
"""Stands in for `unbroken serve`."""


class Script(Part):
    """A part whose command is a Python script."""

    def make_command(self, python: str, **places: str | int) -> list[str]:
        return [sys.executable, "-c", *self.command]


def part(script: str, kind: Kind = Kind.ENGINE, **values) -> Script:
    return Script(kind=kind, index=0, command=(script,), num_cpus=1, num_gpus=0, **values)


@pytest.fixture
def place(tmp_path: Path) -> NodePlace:
    return NodePlace(host="127.0.0.1", folder=tmp_path, work_dir=tmp_path, environment={"A": "1"})


def wait_until(holds) -> None:
    until_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_is_killed_serves_again_and_its_reason_is_noted(place):
    notes: list[tuple[str, str]] = []
    service = Service(part(SERVER), place, lambda *note: notes.append(note))
    thread = threading.Thread(target=service.run)
    thread.start()
    wait_until(lambda: service.state == "serves")
    assert (service.version, service.url[:17]) == (5, "http://127.0.0.1:")
    first = service.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: service.state == "serves" and service.pid != first)
    service.stop()
    thread.join(20)
    assert (service.state, service.url, is_alive(service.pid)) == ("ended", "", False)
    assert [what for what, _ in notes] == ["serves", "restart", "serves"]
    assert notes[1][1] == "was killed by SIGKILL; it starts again in 1 s"


def test_a_command_that_fails_is_explained_by_the_last_line_of_its_log(place):
    notes: list[str] = []
    service = Service(
        part("import sys; print('unbroken: no such model', file=sys.stderr); print('x'); sys.exit(1)"), place,
        lambda _, reason: (notes.append(reason), service.stop()),
    )  # fmt: skip
    service.run()
    assert notes == ["ended with status 1: no such model; it starts again in 1 s"]


def test_a_server_that_does_not_answer_is_started_again(place, tmp_path):
    silent = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(f'unbroken serves x at " \
        "http://127.0.0.1:{s.getsockname()[1]} ', flush=True); s.close(); time.sleep(60)"  # fmt: skip
    notes: list[str] = []
    slow = NodePlace(host="127.0.0.1", folder=tmp_path, work_dir=tmp_path, environment={}, start_s=2.0)
    service = Service(part(silent), slow, lambda _, reason: (notes.append(reason), service.stop()))
    service.run()
    assert notes == ["did not answer for 2 s; it starts again in 1 s"]


def test_all_of_a_process_is_killed_when_the_one_that_started_it_is_gone(tmp_path):
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    script = (
        "import sys, time; from pathlib import Path; from unbroken.cluster.processes import NodePlace, Process\n"
        "here = Path(sys.argv[1]); place = NodePlace(host='', folder=here, work_dir=here, environment={})\n"
        f"process = Process([sys.executable, '-c', {child!r}], log=here / 'log', place=place, variables={{}})\n"
        "print(process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(parent.stdout.readline())]
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    pids.append(int(log.read_text()))
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_ranks_have_their_places_and_one_that_fails_ends_the_others(place):
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(0.5)"
    ranks = Ranks(part(script, Kind.TRAINERS, num_processes=2), place)
    assert ranks.run(("127.0.0.1", 1), num_nodes=1, places={}) == ["rank 1 ended with status 3"]
    well = Ranks(part("import os; print(os.environ['WORLD_SIZE'], os.environ['A'])", Kind.TRAINERS), place)
    assert well.run(("127.0.0.1", 1), num_nodes=2, places={}) == []
    assert (place.folder / "trainer-0.log").read_text().endswith("2 1\n")


def test_a_reserved_port_is_bound_by_a_server_and_by_nobody_else():
    with reserve_port("127.0.0.1") as held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(held.getsockname())
        server.listen()
        socket.create_connection(held.getsockname()).close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
