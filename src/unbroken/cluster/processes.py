"""Processes of a part: started, watched, started again after they ended, and never left behind.

start ──► "serves ... at URL" ──► health, each second ──┐
  ▲                                                     │ it ended, or does not answer
  └────────── 1, 2, 4, ... 60 s ◄── reason ◄────────────┘
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

FOLDER = "cluster"
"""In the output of a run: logs, the key and the lists of a cluster."""
ENGINES, PLACES, KEY = "engines.txt", "places.json", "key"
_SERVES = re.compile(rb"serves .* at (http://\S+)\s")
_KEEPER = 'read -r _; kill -KILL "-$1"'
"""Waits for the end of its input, which is that of whoever started it, however that ended."""
_POLL_S = 0.25
_HEALTH_EVERY_S = 1.0
_CALM_S = 60.0
"""After so long without an end, the next wait is short again."""
_MAX_WAIT_S = 60.0
_STOP_S = 60.0
_ASK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Kind(StrEnum):
    """What a part does."""

    TRAINERS = "trainers"
    ENGINE = "engine"
    SAMPLER = "sampler"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command on a node, or several of the same."""

    kind: Kind
    index: int
    command: tuple[str, ...]
    """Without the Python. `{host}` and `{port}` stand for the node's address and a port of its own, `{gateway}` for the
    URL of the first gateway, `{listen}` for the address at which rank 0 gives orders to samplers, and `{trainer}` for
    that of the rank which a sampler serves."""
    num_cpus: int
    num_gpus: int
    num_processes: int = 1

    @property
    def name(self) -> str:
        """Such as engine-3."""
        return f"{self.kind}-{self.index}"

    def make_command(self, python: str, **places: str | int) -> list[str]:
        """The command on a node, with what stands for `{host}`, `{port}` ..."""
        words = list(self.command)
        for name, value in places.items():
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        return [python, "-m", "unbroken", *words]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Where the processes of a part run."""

    host: str
    """The node's address, at which servers listen."""
    folder: Path
    """Gets the logs."""
    work_dir: Path
    environment: Mapping[str, str]
    start_s: float = 600.0
    """How long a server may take to serve."""
    health_s: float = 30.0
    """How long a server may leave its health check unanswered."""


class Process:
    """A command in a session of its own. All of it is killed when the process that started it is gone."""

    def __init__(self, command: Sequence[str], *, log: Path, place: NodePlace, variables: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self.begin = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=place.work_dir,
                env={**_own_variables(), **place.environment, **variables, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "keeper", str(self.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    def poll(self) -> int | None:
        """The exit status, or minus the signal; None while it runs."""
        return self._process.poll()

    def end(self, grace_s: float) -> None:
        """End it by SIGTERM, and whatever is left after `grace_s` by SIGKILL."""
        if self.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what it has started
        self._process.wait()
        self._keeper.kill()
        self._keeper.communicate()

    def explain_end(self) -> str:
        """How it ended, with the last line of its log that says why."""
        status = self.poll()
        how = (
            f"was killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
        )
        return f"{how}{self._find_error()}"

    def find_url(self) -> str | None:
        """What it says that it serves."""
        with self.log.open("rb") as log:
            log.seek(self.begin)
            found = _SERVES.search(log.read())
        return None if found is None else found[1].decode()

    def _find_error(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(self.begin, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            if line.startswith("unbroken: "):
                return f": {line.removeprefix('unbroken: ')[:500]}"
        return ""


def _own_variables() -> dict[str, str]:
    """Those of this process, without what Ray tells its own workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


class Service:
    """One command that is kept running, until `stop`."""

    def __init__(self, part: Part, place: NodePlace, note: Callable[[str, str], None]) -> None:
        """`note` gets what happens, and why."""
        self._part = part
        self._place = place
        self._note = note
        self._stopping = threading.Event()
        self._port = reserve_port(place.host) if "{port}" in " ".join(part.command) else None
        self.state, self.url, self.pid = "starts", "", 0
        self.version: int | None = None

    def run(self) -> None:
        """Start it again and again."""
        wait_s = 1.0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            reason = self._live()
            if self._stopping.is_set():
                break
            wait_s = 1.0 if time.monotonic() - began_s > _CALM_S else wait_s
            self.state = "waits"
            self._note("restart", f"{reason}; it starts again in {wait_s:g} s")
            self._stopping.wait(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
        self.state, self.url = "ended", ""

    def stop(self) -> None:
        """Have `run` end the process and return."""
        self._stopping.set()

    def _live(self) -> str:
        """Run the command once; returns why it is no more."""
        self.state, self.url, self.version = "starts", "", None
        port = 0 if self._port is None else self._port.getsockname()[1]
        places = self._find_places()
        if self._stopping.is_set():
            return ""
        command = self._part.make_command(sys.executable, host=self._place.host, port=port, **places)
        log = self._place.folder / f"{self._part.name}.log"
        process = Process(command, log=log, place=self._place, variables={})
        self.pid = process.pid
        try:
            return self._watch(process)
        finally:
            self.url = ""
            process.end(_STOP_S if self._stopping.is_set() else 0.0)

    def _find_places(self) -> dict[str, str]:
        """Of a sampler: wait until trainers give orders, and find the one that it serves."""
        path = self._place.folder / PLACES
        while self._part.kind is Kind.SAMPLER and not self._stopping.wait(_POLL_S):
            with suppress(OSError, ValueError):  # not there, or being written
                found = json.loads(path.read_text())
                ranks = found["trainers"]
                return {"trainer": ranks[self._part.index % len(ranks)], "gateway": found["gateway"]}
        return {}

    def _watch(self, process: Process) -> str:
        has_url = self._part.kind is not Kind.SAMPLER
        limit_s = self._place.start_s
        heard_s = asked_s = time.monotonic()
        url: str | None = None
        if not has_url:
            self.state = "serves"
        while not self._stopping.wait(_POLL_S):
            if process.poll() is not None:
                return process.explain_end()
            now_s = time.monotonic()
            if not has_url or now_s - asked_s < _HEALTH_EVERY_S:
                continue
            asked_s, url = now_s, url or process.find_url()
            if url is not None and (version := _ask_version(url, self._part.kind)) is not None:
                if self.state != "serves":
                    self._note("serves", f"at {url}")
                self.state, self.url, self.version = "serves", url, version
                heard_s, limit_s = time.monotonic(), self._place.health_s
            elif now_s - heard_s > limit_s:
                return f"did not answer for {limit_s:g} s"
        return ""


def _ask_version(url: str, kind: Kind) -> int | None:
    """The version of a server that is well; a gateway must only answer, because its health is that of its engines."""
    try:
        if kind is Kind.ENGINE:
            _ASK.open(f"{url}/health", timeout=10).close()
        with _ASK.open(f"{url}/version", timeout=10) as answer:
            return int(json.load(answer).get("policy_version") or 0)
    except (OSError, ValueError):
        return None


class Ranks:
    """The processes of one node of a gang of trainers."""

    def __init__(self, part: Part, place: NodePlace) -> None:
        self._part = part
        self._place = place
        self._processes: list[Process] = []
        self._stopping = threading.Event()
        self._store: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Of the first; 0 if none runs."""
        return self._processes[0].pid if self._processes else 0

    def reserve_store(self) -> tuple[str, int]:
        """The address for the store of all ranks, which rank 0 opens here."""
        self._store = self._store or reserve_port(self._place.host)
        return self._place.host, self._store.getsockname()[1]

    def run(self, store: tuple[str, int], *, num_nodes: int, places: Mapping[str, str]) -> list[str]:
        """Train; returns why processes did not end well, which is empty at the end of the run.

        `places` are those of the command that all nodes share.
        """
        self._stopping.clear()
        size = self._part.num_processes
        command = self._part.make_command(sys.executable, **places)
        try:
            for local in range(size):
                rank = self._part.index * size + local
                variables = {
                    "RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": num_nodes * size, "LOCAL_WORLD_SIZE": size,
                    "GROUP_RANK": self._part.index, "MASTER_ADDR": store[0], "MASTER_PORT": store[1],
                }  # fmt: skip
                log = self._place.folder / f"trainer-{rank}.log"
                texts = {name: str(value) for name, value in variables.items()}
                self._processes.append(Process(command, log=log, place=self._place, variables=texts))
            while not self._stopping.wait(_POLL_S) and all(each.poll() in (None, 0) for each in self._processes):
                if all(each.poll() == 0 for each in self._processes):
                    break
            ends = [(self._part.index * size + k, each) for k, each in enumerate(self._processes)]
            return [f"rank {rank} {each.explain_end()}" for rank, each in ends if each.poll() not in (None, 0)]
        finally:
            self._end()

    def stop(self) -> None:
        """Have `run` end its processes and return."""
        self._stopping.set()

    def _end(self) -> None:
        # A rank that learns of another's loss ends by itself, with a message; those that compute may take a while.
        for each in self._processes:
            if each.poll() is None and self._stopping.is_set():
                os.kill(each.pid, signal.SIGTERM)
        for each in self._processes:
            each.end(_STOP_S if self._stopping.is_set() else 20.0)
        self._processes.clear()


def reserve_port(host: str) -> socket.socket:
    """Bind a port that nobody else gets while the socket is open, except a server that allows its address to be reused.

    It does not listen, so a server of the same user can bind the same port (SO_REUSEADDR), at any time and again.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held
