"""An agent that is a command: a separate process group for each attempt, in a copy of a folder, and a check after it.

copy of the workspace ── the agent's command, to its end ── the check, in the same copy ── reward 1 or 0
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from unbroken.errors import InvalidInputError, RewardError
from unbroken.rollout.agents.container import NOT_FOUND, NOT_STARTED, Image
from unbroken.rollout.agents.known import KnownAgent
from unbroken.rollout.agents.session import AgentOutcome, AgentSession
from unbroken.untrusted import read_end

_log = logging.getLogger(__name__)

_TERM_S = 2.0
"""How long a process tree may take to end by itself."""
_MAX_END_CHARS = 4000
_MAX_END_BYTES = 1 << 20
"""Of what a program printed, however much it is."""
_ATTEMPT = "UNBROKEN_ATTEMPT"
"""The variable by which the processes of an attempt are known: its folder, which no other has."""
_MAX_ROUNDS, _ROUND_S = 20, 0.02
_INHERITED = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TERM",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    }
)
"""The variables that programs need to start, in addition to LC_*: none of them holds a secret."""


class CommandReward(StrEnum):
    """Where the reward of a command comes from."""

    NONE = "none"
    """By another: a check, a reward function, or `finish` of the session."""
    EXIT = "exit"
    """1 if it exits with 0, else 0."""
    OUTPUT = "output"
    """The last line of its standard output, a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A folder that is copied for each attempt."""

    folder: Path
    leave_out: Path
    """What is not copied if it is inside: the output of the run, which grows with each attempt."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise InvalidInputError(f"agent.workspace must be a folder, got {self.folder}: there is no such folder")
        if (self.folder / ".git").is_file():
            raise InvalidInputError(
                f"agent.workspace must not be a worktree or submodule of git, got {self.folder}: a copy shares the "
                "index and the branch of the original, which a commit of the agent would change. Take a clone"
            )

    def copy(self, target: Path) -> None:
        """Copy it to `target`, which does not exist yet. Links stay links.

        Raises:
            InvalidInputError: a file cannot be read, or is a pipe, a socket or a device.
        """
        left_out = self.leave_out.resolve()

        def leave_out(parent: str, names: list[str]) -> list[str]:
            return [name for name in names if Path(parent, name) == left_out]

        try:
            shutil.copytree(self.folder.resolve(), target, symlinks=True, ignore=leave_out)
        except shutil.Error as error:
            file, _, reason = error.args[0][0]
            raise InvalidInputError(
                f"agent.workspace must be a folder that can be copied, got {self.folder}: {file}: {reason}"
            ) from error
        except OSError as error:  # of the folder itself, or a full disk
            raise InvalidInputError(
                f"agent.workspace must be a folder that can be copied, got {self.folder}: {error}"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command whose exit status is the reward: 0 is 1.0, any other is 0.0."""

    command: Sequence[str]
    timeout_s: float
    """A check that takes longer is ended, and the reward is 0: code that hangs has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """Starts a command for each attempt, with the session in its environment (`AgentSession.environment`).

    It runs in its own folder, without input. When it ends, or is cancelled by a time-out, its whole process group
    is ended too, and on Linux what has left the group. What it writes is kept as `<logs>/<session id>.log`, and as
    `.err`; what its check writes, as `.check.log` and `.check.err`.

    Of this process's variables it gets only those that programs need to start: keys, such as of a tracker or a hub, are
    not for it.
    """

    command: Sequence[str] = ()
    known: KnownAgent | None = None
    """Instead of a command: an agent with a fresh home, its own variables alone, and `instruction` as its task."""
    instruction: str = ""
    reward: CommandReward = CommandReward.NONE
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables; those of the session win."""
    inherit: Sequence[str] = ()
    """Names of further variables of this process that it gets."""
    workspace: Workspace | None = None
    """What is copied to where it runs; none: an empty folder. It is removed afterwards."""
    image: Image | None = None
    """Command and check run in containers of it, with the copy and the home mounted; none: they run here."""
    check: Check | None = None
    """Gives the reward, instead of `reward`."""
    logs: Path | None = None
    """Where its output is kept; none: nowhere."""

    def __post_init__(self) -> None:
        is_command = not isinstance(self.command, str) and all(isinstance(word, str) for word in self.command)
        if not is_command or (self.known is None and not self.command):
            raise InvalidInputError(f"command must be a list of words, the program first, got {self.command!r}")
        for name in self.inherit:
            if name not in os.environ:
                raise InvalidInputError(f"agent.inherit must name environment variables that are set, got {name!r}")

    async def __call__(self, session: AgentSession) -> float | AgentOutcome | None:
        """Run the command, and then its check, to their ends.

        Raises:
            InvalidInputError: the workspace cannot be copied, or the program or the check cannot be started.
            ChildProcessError: it failed, and neither its exit nor a check is the reward.
            RewardError: its last line is not a number.
        """
        async with _make_scratch() as scratch:
            logs = scratch if self.logs is None else self.logs
            logs.mkdir(parents=True, exist_ok=True)
            output, errors = logs / f"{session.session_id}.log", logs / f"{session.session_id}.err"
            work, home = scratch / "work", scratch / "home"
            home.mkdir()
            if self.workspace is None:
                work.mkdir()
            else:
                with session.preparation.running():
                    await _finish_in_thread(self.workspace.copy, work)
            if self.known is None:
                words, own = self.command, session.environment()
            else:
                words, own = self.known.start(session, instruction=self.instruction, home=home)
            own |= {_ATTEMPT: str(scratch)}
            status = await self._run(words, own, work=work, home=home, output=output, errors=errors)
            await _finish_in_thread(_end_strays, scratch)  # what still runs would change what is checked
            failure = self._describe_failure(words[0], status, _read_end(errors, output)) if status else None
            if self.check is not None:
                with session.preparation.running():
                    reward = await self._run_check(self.check, session, work, logs)
                return AgentOutcome(reward=reward, metrics={FAILED: float(failure is not None)}, failure=failure)
            if self.reward is CommandReward.EXIT:
                return float(status == 0)
            if failure is not None:
                raise ChildProcessError(failure)
            return _read_reward(output) if self.reward is CommandReward.OUTPUT else None

    def _describe_failure(self, program: str, status: int, end: str) -> str:
        has_none = self.image is not None and self.known is not None and status in NOT_FOUND
        advice = f". The image must have it: {self.known.install}" if has_none and self.known else ""
        return f"{program} exited with {status}: {end}{advice}"

    async def _run(
        self,
        words: Sequence[str],
        own: Mapping[str, str],
        *,
        work: Path,
        home: Path | None,
        output: Path,
        errors: Path,
        field: str = "command",
    ) -> int:
        """Run a command here or in a container, with the variables `own` and the user's further ones; its exit status.

        A container has no variable of this machine but these.
        """
        variables = {**self._read_variables(), **own}
        if self.image is None:
            return await run_process(words, folder=work, variables=variables, output=output, errors=errors, field=field)
        container = self.image.open(work, home)
        wrapped = container.wrap(words, {*own, *self.environment, *self.inherit})
        # The program that starts it has its own configuration in the user's home.
        starting = {**os.environ, **variables, **{name: os.environ[name] for name in _OF_USER if name in os.environ}}
        try:
            status = await run_process(
                wrapped, folder=work, variables=starting, output=output, errors=errors, field="agent.image"
            )
        finally:
            await _finish_in_thread(container.remove)
        if status == NOT_STARTED:
            end = _read_end(errors, output)
            raise InvalidInputError(f"agent.image must be an image that can be started, got {self.image.name!r}: {end}")
        return status

    def _read_variables(self) -> dict[str, str]:
        names = _INHERITED.union(self.inherit)
        kept = {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}
        return {**kept, **self.environment}

    async def _run_check(self, check: Check, session: AgentSession, work: Path, logs: Path) -> float:
        """The reward, by the check's exit. It gets the row, and nothing that opens the session."""
        known = session.environment()
        own = {**{name: known[name] for name in _OF_CHECK}, _ATTEMPT: str(work.parent)}
        files = {kind: logs / f"{session.session_id}.check.{kind}" for kind in ("log", "err")}
        try:
            async with asyncio.timeout(check.timeout_s):
                status = await self._run(
                    check.command,
                    own,
                    work=work,
                    home=None,
                    output=files["log"],
                    errors=files["err"],
                    field="agent.check",
                )
        except TimeoutError:
            return 0.0
        except InvalidInputError:
            if self.image is not None or not _is_inside(check.command[0]):
                raise
            return 0.0  # it was there before the agent came, who has removed or damaged it
        return float(status == 0)


FAILED = "agent_failed"
"""The metric of a checked attempt: whether the agent exited with anything but 0, as after a limit of its session."""
_OF_CHECK = ("UNBROKEN_TASK", "UNBROKEN_SESSION_ID")
_OF_USER = ("HOME", "PATH")


def check_program(words: Sequence[str], *, field: str, workspace: Workspace | None) -> None:
    """Raise `InvalidInputError` if the first of these words is no program, on PATH or in the workspace."""
    program = words[0]
    if _is_inside(program):
        path = None if workspace is None else shutil.which(workspace.folder / program)
        where = "in the workspace"
    else:
        path, where = shutil.which(program), "on PATH" if "/" not in program else "at this path"
    if path is None:
        raise InvalidInputError(f"{field} must begin with a program, got {program!r}: there is none {where}")


def _is_inside(program: str) -> bool:
    """Whether a program is a file of the folder that it runs in."""
    return "/" in program and not program.startswith("/")


@asynccontextmanager
async def _make_scratch() -> AsyncIterator[Path]:
    """A folder that is removed at the end, in a thread: a workspace may have many files."""
    scratch = tempfile.TemporaryDirectory(prefix="unbroken-agent-", ignore_cleanup_errors=True)
    try:
        yield Path(scratch.name)
    finally:
        await _finish_in_thread(_remove, scratch)


def _remove(scratch: tempfile.TemporaryDirectory[str]) -> None:
    _end_strays(Path(scratch.name))
    scratch.cleanup()
    if Path(scratch.name).exists():
        _log.warning("%s cannot be removed: it has files of an agent that are another user's", scratch.name)


def _end_strays(scratch: Path) -> None:
    """End the processes of an attempt that left its process group, found by the variable that all of them inherit.

    Cline 3.0 started a daemon in its own group, one for each attempt. Only Linux lists the variables of processes.
    """
    line = f"{_ATTEMPT}={scratch}".encode()
    for _ in range(_MAX_ROUNDS):  # one that is ended may have started another before
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if line in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return
        time.sleep(_ROUND_S)


async def _finish_in_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a thread. If this is cancelled it still ends first: a folder is not removed while copied."""
    work = asyncio.create_task(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


async def run_process(
    words: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    output: Path,
    errors: Path,
    field: str = "command",
) -> int:
    """Run a command without input to its end; returns its exit status.

    When it ends, or this is cancelled, its whole process group is ended too. `output` and `errors` get what it writes;
    only the user can read them, as programs may print what they know.

    Raises:
        InvalidInputError: the program cannot be started, which `field` names.
    """
    with _create(output) as out, _create(errors) as err:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=dict(variables),
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise InvalidInputError(f"{field} must be a program, got {words[0]!r}: {error}") from None
        except asyncio.CancelledError:  # asyncio would kill the process, but none that it has started
            starting.add_done_callback(_kill_group)
            await asyncio.wait([starting])
            raise
    try:
        return await process.wait()
    finally:
        await _end_group(process)


def _create(file: Path) -> BinaryIO:
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of a process group: first politely, if its leader still runs."""
    try:
        if process.returncode is None:
            _signal_group(process, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), _TERM_S)
    finally:  # also if the caller is cancelled once more
        _signal_group(process, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


def _kill_group(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _signal_group(starting.result(), signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read_end(*files: Path) -> str:
    """The end of the first of these files that has any text, for an error."""
    texts = [read_end(file, max_bytes=_MAX_END_BYTES).strip() for file in files]
    return next((text for text in texts if text), "no output")[-_MAX_END_CHARS:]


def _read_reward(output: Path) -> float:
    lines = read_end(output, max_bytes=_MAX_END_BYTES).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        reward = float(last)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise RewardError(f"the last line of the command's output must be a finite number, got {last[:100]!r}")
    return reward
