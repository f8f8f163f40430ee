"""Python processes for tests, forked from one that has imported torch, transformers and us (8 CPU seconds).

`multiprocessing`'s fork server forks them: a process without threads, where forking is safe.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any
from unittest.mock import patch

LONGEST_S = 240.0
_IMPORTED, _COLLECTED, _FROZEN = "support.imported", "support.collected", "support.frozen"
_SERVER = "UNBROKEN_TESTS_FORK_SERVER"
"""The variable with the address of the fork server, for commands that are to be forks."""
_preloaded = [_IMPORTED]
_started: list[int | None] = []
"""The ids of the servers that this module has started."""
_starting = threading.Lock()


def preload(module: str) -> None:
    """Have the fork server import this module too, if it does not run yet; one that processes share is left to them."""
    if module not in _preloaded:
        _preloaded.append(module)
        server: Any = multiprocessing.forkserver._forkserver
        if vars(server).pop("ensure_running", None) is not None:
            server._forkserver_address = None


def fork_server() -> ForkServerContext:
    """The context whose processes are forks."""
    server: Any = multiprocessing.forkserver._forkserver
    context = multiprocessing.get_context("forkserver")
    with _starting:
        if server._forkserver_pid not in (None, *_started):
            server._stop()  # a template's process has started it, without our modules
        context.set_forkserver_preload([*_preloaded, _FROZEN])
        # Python 3.11 imports the modules before it takes over our path, and ignores those that it does not find.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            server.ensure_running()
        _started.append(server._forkserver_pid)
    return context


class ForkedPython:
    """`python FILE` or `python -m MODULE` in a fork, with `subprocess.Popen`'s methods; its output goes into files.

    Commands of ours that it starts are forks too.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str | Path,
        output: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
        new_session: bool = False,
    ) -> None:
        """Start it.

        Args:
            program: A file, or the name of a module.
            arguments: Its command line.
            output: The file that gets its standard output.
            errors: The file that gets its standard errors; `output` if not given.
            environment: Variables beside those of this process.
            new_session: Whether the process leads a session of its own.
        """
        context, forks = fork_server(), commands_as_forks()
        output.write_bytes(b"")
        with _starting:  # `patch.dict` empties `os.environ` for a moment
            variables = {**os.environ, **forks, **(environment or {})}
        self._process = context.Process(
            target=_run,
            args=(program, list(map(str, arguments)), Path.cwd(), output, errors or output, variables, new_session),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_python(
    program: str | Path, *arguments: str | Path, timeout: float, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a `ForkedPython` to its end and return what it wrote, or kill it after `timeout` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = ForkedPython(program, *arguments, output=output, errors=errors, environment=environment)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        return CompletedProcess(str(program), process.wait(), output.read_text(), errors.read_text())


def commands_as_forks() -> dict[str, str]:
    """Variables with which `python -m unbroken ...`, started by anybody, is a fork."""
    fork_server()
    server: Any = multiprocessing.forkserver._forkserver
    path = [str(Path(__file__).with_name("commands")), *sys.path]
    return {"PYTHONPATH": os.pathsep.join(path), _SERVER: server._forkserver_address}


@contextmanager
def forks_with(folder: Path) -> Iterator[dict[str, str]]:
    """Variables as those of `commands_as_forks`, for forks that have imported modules of this folder before others."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "support.forks"]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())
        server.kill()


def run_command_in_fork() -> None:
    """Have a fork do what this process was started for (`commands/sitecustomize.py`), and end as it does.

    The fork gets SIGTERM from this process, and SIGKILL once this process is gone, however that ended.
    """
    if _SERVER not in os.environ:
        return
    status = 1
    try:
        _use_server(os.environ[_SERVER])
        program, *arguments = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
        outputs = [Path(f"/proc/{os.getpid()}/fd/{number}") for number in (1, 2)]
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(program, arguments, Path.cwd(), *outputs, dict(os.environ), True, True)
        )
        process.start()
        assert process.pid is not None
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(process.pid or 0, number))
        process.join()
        assert process.exitcode is not None
        status = process.exitcode
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def start_workers_as_forks(specs: Sequence[Any]) -> None:
    """Have the workers of xdist be forks of one process, which imports once what each of them would (8 CPU seconds).

    They share its fork server, too. What a test finds in its process is as in a worker of xdist's own but for that.
    """
    _preloaded.insert(0, _COLLECTED)
    for spec in specs:
        if spec.popen and spec.python is None:
            spec.python = shlex.join(python_as_fork())


def python_as_fork() -> tuple[str, ...]:
    """The words of a command that is `python`, with `-c LINE` after them, whose line a fork runs."""
    fork_server()
    server: Any = multiprocessing.forkserver._forkserver
    return sys.executable, str(Path(__file__).with_name("forked_python.py")), server._forkserver_address


def run_line_in_fork(address: str, line: str) -> int:
    """Have a fork of this server run a line of Python with this process's input and output; the fork's status.

    The fork gets SIGKILL once this process is gone.
    """
    _use_server(address)
    vars(sys.modules["__main__"])["__file__"] = None  # the fork would run that file first
    streams = [Path(f"/proc/{os.getpid()}/fd/{number}") for number in (0, 1, 2)]
    arguments = (line, Path.cwd(), *streams, dict(os.environ))
    process = multiprocessing.get_context("forkserver").Process(target=_run_line, args=arguments)
    process.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork gets it, too
    process.join()
    return 1 if process.exitcode is None else abs(process.exitcode)


def call(function: Callable[..., Any], *, limit_s: float = LONGEST_S, **arguments: Any) -> int:
    """Call a function in a fork and kill it after `limit_s`; its exit code, or minus the signal that ended it."""
    process = fork_server().Process(target=_call, args=(function, arguments))
    process.start()
    process.join(limit_s)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    _check_preloaded()
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    function(**arguments)


def _run(
    program: str | Path,
    arguments: list[str],
    folder: Path,
    output: Path,
    errors: Path,
    variables: dict[str, str],
    new_session: bool,
    ends_with_parent: bool = False,
) -> None:
    _check_preloaded()
    _share_server()
    if new_session:
        os.setsid()
    if ends_with_parent:
        _end_with_parent(-os.getpid())  # what it has started, too
    # A shell ignores SIGINT in what it starts in the background, and so do the processes of such a test run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    if (cache := variables.get("HF_DATASETS_CACHE")) is not None and "datasets" in sys.modules:
        vars(sys.modules["datasets"].config)["HF_DATASETS_CACHE"] = Path(cache)  # it is read at the import
    os.chdir(folder)  # that of the fork server is where it was started
    with output.open("ab") as file, errors.open("ab") as error_file:
        os.dup2(file.fileno(), 1)
        os.dup2(error_file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _run_line(line: str, folder: Path, source: Path, output: Path, errors: Path, variables: dict[str, str]) -> None:
    _check_preloaded()
    _share_server()
    _end_with_parent(os.getpid())
    vars(multiprocessing.process)["_parent_process"] = None  # it is no part of a program that a test has started
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, path, mode in ((0, source, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        with suppress(OSError if number == 2 else ()):  # a socket cannot be opened: errors go to the server's then
            opened = os.open(path, mode)
            os.dup2(opened, number)
            os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = ["-c"]
    exec(line, {"__name__": "__main__"})
    atexit._run_exitfuncs()  # which a fork of multiprocessing leaves out


def _end_with_parent(target: int) -> None:
    """Have the kernel kill a process (or -group) when the parent's end of a pipe is closed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, target)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        os._exit(1)  # it was closed before


def _share_server() -> None:
    """Have the context `forkserver` of this fork use the server that forked it; Python would start another one."""
    server: Any = multiprocessing.forkserver._forkserver
    server.ensure_running = lambda: None


def _use_server(address: str) -> None:
    """Have the context `forkserver` of this process use another one's server, and no tracker of resources."""
    server: Any = multiprocessing.forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    nobody = os.open(os.devnull, os.O_WRONLY)
    server._forkserver_address, server._forkserver_alive_fd, tracker._fd = address, nobody, nobody
    _share_server()


def _check_preloaded() -> None:
    assert _IMPORTED in sys.modules, f"the fork server did not find {_IMPORTED} in {sys.path}"


if __name__ == "__main__":  # of `forks_with`: the fork server lives as long as this process
    print(json.dumps(commands_as_forks()), flush=True)
    sys.stdin.read()
