"""What a part runs on its node: processes that are started, watched, explained and never left behind.

`Runner` is the one actor. The driver says what to run, and decides what happens after its end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from unbroken.server.config import format_url
from unbroken.untrusted import read_json

_KEEPER = 'read -r _; kill -KILL "-$1"'
"""Waits for the end of its input, which is that of whoever started it, however that ended."""
_POLL_S = 0.5
_MAX_BYTES = 1 << 20
"""Of a server's answer."""
_STOP_S, _FAIL_S = 60.0, 20.0
"""How long processes have to end when they are stopped, and when one of them has failed."""


class Kind(StrEnum):
    """What a part does."""

    TRAINERS = "trainers"
    ENGINE = "engine"
    SAMPLER = "sampler"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process of a part."""

    words: Sequence[str]
    """Those of `unbroken`."""
    log: Path
    """Gets its output, behind what is there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    """Which of the part's processes it is: begins the reason of its end."""

    def make_words(self, python: str) -> list[str]:
        """The words with which a process starts."""
        return [python, "-m", "unbroken", *self.words]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Where a part runs."""

    node: str
    """Its name, which is unique."""
    host: str
    """Its address, at which servers listen."""
    port: int

    @property
    def url(self) -> str:
        """Of a server there."""
        return format_url(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """How a part is."""

    name: str
    kind: Kind
    node: str = ""
    """Its name, which is unique."""
    state: str = "waits"
    """waits, starts, serves, trains, ended."""
    url: str = ""
    version: int | None = None
    pid: int = 0
    """Of the first process."""


class Process:
    """A command in its own session. All of it is killed when the process that started it is gone."""

    def __init__(self, command: Command, work_dir: Path) -> None:
        self._command = command
        with command.log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command.make_words(sys.executable),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=work_dir,
                env={**_own_variables(), **command.variables, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "keeper", str(self.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    def poll(self) -> int | None:
        """The exit status, or minus the signal; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        self._process.send_signal(number)

    def end(self, until_s: float) -> None:
        """Wait for its end until then on the monotonic clock; kill what is left of it and of what it has started."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until_s - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._keeper.kill()
        self._keeper.communicate()

    def explain_end(self) -> str:
        """How it ended, with the last line of its log that says why."""
        status = self.poll() or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        with self._command.log.open("rb") as log:
            log.seek(max(self._begin, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode("utf-8", "replace").splitlines()
        errors = [line.removeprefix("unbroken: ")[:500] for line in lines if line.startswith("unbroken: ")]
        return ": ".join([f"{self._command.name} {how}".lstrip(), *errors[-1:]])


def _own_variables() -> dict[str, str]:
    """Those of this process, without what Ray tells its own workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


class Runner:
    """The processes of one part on a node. `run` is called in one thread, the rest in others."""

    def __init__(
        self, name: str, kind: Kind, work_dir: Path, *, start_s: float = 600.0, health_s: float = 30.0
    ) -> None:
        """A server may take `start_s` until it serves, and leave its health check unanswered for `health_s`."""
        self._state = PartState(name=name, kind=kind)
        self._work_dir = work_dir
        self._start_s, self._health_s = start_s, health_s
        self._is_running = threading.Lock()
        self._stopped = 0
        self._port: socket.socket | None = None

    def find_place(self) -> NodePlace:
        """Where it is, with a port that stays this part's as long as it is there."""
        import ray  # only the driver and its actors do

        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._port = self._port or reserve_port(host)
        self._state = replace(self._state, node=name_node(host, node))
        return NodePlace(node=self._state.node, host=host, port=self._port.getsockname()[1])

    def run(self, number: int, commands: Sequence[Command], url: str = "") -> list[str]:
        """Run commands until all have ended well, one has not, or `stop`; returns why they did not end well.

        Numbers of runs rise. What serves at a `url` must answer there.
        """
        processes: list[Process] = []
        with self._is_running:
            if self._stopped >= number:
                return []
            try:
                for each in commands:
                    processes.append(Process(each, self._work_dir))
                return self._watch(number, processes, url)
            finally:
                for process in processes:
                    process.send(signal.SIGTERM)
                until_s = time.monotonic() + (_FAIL_S if self._stopped < number else _STOP_S)
                for process in processes:
                    process.end(until_s)
                self._state = replace(self._state, state="waits", url="", pid=0)

    def look(self) -> PartState:
        """How it is."""
        return self._state

    def stop(self, number: int) -> None:
        """End the runs up to this number, also one that has not begun; returns when they have ended."""
        self._stopped = max(self._stopped, number)
        with self._is_running:
            pass

    def _watch(self, number: int, processes: Sequence[Process], url: str) -> list[str]:
        are_trainers, first = self._state.kind is Kind.TRAINERS, processes[0]
        state = "starts" if url else "trains" if are_trainers else "serves"
        self._state = replace(self._state, state=state, url="", version=None, pid=first.pid)
        heard_s, limit_s = time.monotonic(), self._start_s
        while self._stopped < number:
            ends = [process.poll() for process in processes]
            if any(ends) or None not in ends:
                return [process.explain_end() for process in processes if process.poll() or not are_trainers]
            if url and (version := _ask_version(url, self._state.kind)) is not None:
                self._state = replace(self._state, state="serves", url=url, version=version)
                heard_s, limit_s = time.monotonic(), self._health_s
            elif url and time.monotonic() - heard_s > limit_s:
                first.send(signal.SIGKILL)
                return [f"did not answer for {limit_s:g} s"]
            time.sleep(_POLL_S)
        return []


def _ask_version(url: str, kind: Kind) -> int | None:
    """The version of a server that is well; a gateway must only answer, because its health is that of its engines."""
    import urllib.request  # a tenth of what `unbroken --help` may take

    server = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        if kind is Kind.ENGINE:
            server.open(f"{url}/health", timeout=10).close()
        with server.open(f"{url}/version", timeout=10) as answer:
            return int(dict(read_json(answer.read(_MAX_BYTES + 1), max_bytes=_MAX_BYTES)).get("policy_version") or 0)
    except (OSError, ValueError, TypeError):
        return None


def reserve_port(host: str) -> socket.socket:
    """Bind a port that nobody else gets while the socket is open, except a server that allows its address to be reused.

    It does not listen, so a server of the same user can bind the same port (SO_REUSEADDR), at any time and again.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def name_node(address: str, node_id: str) -> str:
    """A name for people: nodes of one machine have the same address."""
    return f"{address}/{node_id[:6]}"
