"""Attempts of terminal tasks on this machine: environment, agent, verifier, one after the other."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError, TaskError
from unbroken.integrations.harbor.config import Keep, Network, TerminalConfig
from unbroken.integrations.harbor.fields import NetworkMode
from unbroken.integrations.harbor.local.bridge import Bridge, move_session
from unbroken.integrations.harbor.local.building import build_root, check_plan, copy_root
from unbroken.integrations.harbor.local.files import make_folder, replace_folder
from unbroken.integrations.harbor.local.processes import Command, run_command
from unbroken.integrations.harbor.local.programs import find_program
from unbroken.integrations.harbor.local.sandbox import open_sandbox
from unbroken.integrations.harbor.local.verifying import LOG_FOLDERS, Verdict, verify
from unbroken.integrations.harbor.runner import RunnableTask
from unbroken.integrations.harbor.task import TerminalTask, read_task
from unbroken.rollout.agents.processes import read_end
from unbroken.rollout.agents.session import AgentOutcome, AgentSession

_SOLUTION_TIMEOUT_S = 600.0
ROOT_VARIABLE = "UNBROKEN_TASK_ROOT"
"""What absolute paths of the task begin with: nothing in a sandbox."""

logger = logging.getLogger(__name__)


class LocalRunner:
    """Runs a command-line agent on tasks, each attempt in a copy of the task's environment.

    An environment is built once, when its task is first attempted, and checked by the task's own solution.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        config: TerminalConfig | None = None,
        logs: Path | None = None,
    ) -> None:
        """Open the sandbox and find the agent's program.

        Args:
            command: the agent's words; `AgentSession.fill` says what is filled in.
            variables: further environment variables of the agent, filled in likewise; those of the session win.
            config: how tasks are run.
            logs: where the folders of attempts are kept, by the ids of their sessions; None: nowhere.

        Raises:
            InvalidInputError: there is no sandbox, no such program, or the program cannot be seen in the sandbox.
        """
        self._config = config or TerminalConfig()
        self._sandbox = open_sandbox(self._config.sandbox, readable=self._config.readable)
        self._command = [find_program(command, self._sandbox), *command[1:]]
        self._variables = dict(variables or {})
        self._logs = logs
        if self._config.work_folder is not None:
            self._config.work_folder.mkdir(parents=True, exist_ok=True)
        self._work = Path(tempfile.mkdtemp(prefix="unbroken-tasks-", dir=self._config.work_folder))
        weakref.finalize(self, shutil.rmtree, self._work, ignore_errors=True)
        self._built: dict[Path, _Built] = {}
        self._noted: set[str] = set()

    def read(self, folder: Path) -> RunnableTask:
        """Read a task, and check that it can be run here; raises `InvalidInputError` if not."""
        task = read_task(folder, accept=self._config.accept, host=os.environ)
        self.check(task)

        async def attempt(session: AgentSession) -> AgentOutcome:
            return await self.attempt(task, session)

        return RunnableTask(
            name=task.name,
            folder=task.folder,
            instruction=task.instruction,
            agent_timeout_s=self._agent_timeout(task),
            attempt=attempt,
        )

    def check(self, task: TerminalTask) -> None:
        """Check that a task can be run here; raises `InvalidInputError` if not, and logs each note once."""
        check_plan(task, self._sandbox, run=self._config.run)
        if self._config.network is Network.TASK and not self._sandbox.own_network:
            raise InvalidInputError('network must be left out with sandbox = "none", where every task has a network')
        notes = [*task.notes]
        if self._config.check and task.solution_folder is None:
            notes.append("no solution/solve.sh: nothing shows that it can be solved here")
        for note in notes:
            if note not in self._noted:
                logger.warning("task %s, and others like it: %s", task.name, note)
        self._noted.update(notes)

    async def attempt(self, task: TerminalTask, session: AgentSession) -> AgentOutcome:
        """Let the agent attempt the task, then verify what it has done.

        An agent that takes too long, or exits with another status than 0, is verified too.

        Raises:
            TaskError: the environment could not be built, the agent failed before it asked the model, or the verifier
                failed.
            InvalidInputError: the agent's program could not be started, or the Dockerfile cannot be followed
                (`check_plan`).
        """
        built = await self._build(task)
        kept = None if self._logs is None or self._config.keep is Keep.NONE else self._logs / session.session_id
        async with self._scratch() as folder:
            root = folder / "root"
            try:
                await copy_root(built, root)
                timed_out, status = await self._run_agent(task, session, root, folder)
                verdict = await self._verify(task, root, log=folder / "verifier.log")
            finally:
                if kept is not None:
                    await asyncio.to_thread(_keep, folder, kept, everything=self._config.keep is Keep.ALL)
        metrics = {"agent_timed_out": float(timed_out), "agent_failed": float(not timed_out and status != 0)}
        return AgentOutcome(reward=verdict.reward, metrics={**metrics, **verdict.metrics})

    async def solve(self, task: TerminalTask) -> Verdict:
        """Run the task's own solution instead of an agent, and verify it.

        Raises:
            TaskError: it has none, or the solution or the verifier failed.
            InvalidInputError: its Dockerfile cannot be followed (`check_plan`).
        """
        return await self._solve(task, await self._prepare(task))

    async def _build(self, task: TerminalTask) -> Path:
        """The root folder of the task's environment; raises the same error again if it could not be built."""
        built = self._built.setdefault(task.folder, _Built())
        async with built.lock:
            if built.failure is not None:
                raise TaskError(built.failure)
            if built.root is None:
                try:
                    built.root = await self._build_and_check(task)
                except TaskError as error:
                    built.failure = str(error)
                    raise
            return built.root

    async def _build_and_check(self, task: TerminalTask) -> Path:
        root = await self._prepare(task)
        if self._config.check and task.solution_folder is not None:
            verdict = await self._solve(task, root)
            if verdict.reward <= 0:
                raise TaskError(
                    f"task {task.folder}: its own solution gets the reward {verdict.reward:g}, so it cannot be solved "
                    "here as it is: a program, a package or the network may be missing. The task's container has "
                    "them; environment_arguments.check = false trains on it in spite of that"
                )
        return root

    async def _prepare(self, task: TerminalTask) -> Path:
        check_plan(task, self._sandbox, run=self._config.run)  # a task can come here that was not read by this runner
        folder = Path(tempfile.mkdtemp(prefix="built-", dir=self._work))
        root = folder / "root"
        root.mkdir()
        has_network = self._config.network is Network.TASK
        await build_root(task, root, self._sandbox, self._config.limits, run=self._config.run, has_network=has_network)
        for path in LOG_FOLDERS:
            make_folder(root, path)
        return root

    async def _solve(self, task: TerminalTask, built: Path) -> Verdict:
        if task.solution_folder is None:
            raise TaskError(f"task {task.folder}: it has no solution/solve.sh")
        async with self._scratch() as folder:
            root, log = folder / "root", folder / "solution.log"
            await copy_root(built, root)
            await asyncio.to_thread(replace_folder, root, "/solution", task.solution_folder)
            command = Command(
                words=("/bin/bash", self._sandbox.locate(root, "/solution/solve.sh")),
                root=root,
                workdir=task.workdir,
                variables={**self._all_variables(task, root), **task.fields.solution_variables},
                output=log,
                errors=log,
                has_network=self._has_network(task.fields.agent_network),
            )
            limit = task.fields.agent_timeout_s or _SOLUTION_TIMEOUT_S
            try:
                status = await run_command(command, self._sandbox, self._config.limits, timeout_s=limit)
            except TimeoutError:
                raise TaskError(f"task {task.folder}: its own solution took longer than {limit:g} s") from None
            if status != 0:
                logger.warning("task %s: its solution exited with %d: %s", task.name, status, read_end(log))
            return await self._verify(task, root, log=folder / "verifier.log")

    async def _run_agent(
        self, task: TerminalTask, session: AgentSession, root: Path, folder: Path
    ) -> tuple[bool, int | None]:
        """Run the agent; returns whether it took too long, and its exit status."""
        has_network = self._has_network(task.fields.agent_network)
        bridge = None if has_network or not self._sandbox.own_network else Bridge.to_gateway(session)
        here = session if bridge is None else move_session(session)
        filled = {name: here.fill(value) for name, value in self._variables.items()}
        command = Command(
            words=[self._command[0], *map(here.fill, self._command[1:])],
            root=root,
            workdir=task.workdir,
            variables={**self._all_variables(task, root), **filled, **here.environment()},
            output=folder / "agent.log",
            errors=folder / "agent.err",
            has_network=has_network,
        )
        limit = self._agent_timeout(task)
        try:
            status = await run_command(command, self._sandbox, self._config.limits, timeout_s=limit, bridge=bridge)
        except TimeoutError:
            return True, None
        if status != 0 and bridge is not None and bridge.num_connections == 0:
            raise TaskError(
                f"{self._command[0]} exited with {status} before it asked the model: "
                f"{read_end(command.errors, command.output)}"
            )
        return False, status

    async def _verify(self, task: TerminalTask, root: Path, *, log: Path) -> Verdict:
        return await verify(
            task,
            root,
            self._sandbox,
            self._config.limits,
            variables=self._all_variables(task, root),
            log=log,
            key=self._config.reward,
            has_network=self._has_network(task.fields.verifier_network),
        )

    def _agent_timeout(self, task: TerminalTask) -> float | None:
        return self._config.agent_timeout_s or task.fields.agent_timeout_s

    def _has_network(self, mode: NetworkMode) -> bool:
        return self._config.network is Network.TASK and mode is NetworkMode.PUBLIC

    def _all_variables(self, task: TerminalTask, root: Path) -> dict[str, str]:
        own = self._sandbox.locate(root, "/").rstrip("/")
        return {"LANG": "C.UTF-8", **task.variables, ROOT_VARIABLE: own}

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Path]:
        """A folder that is removed afterwards, in a thread: an agent may leave many files in it."""
        folder = tempfile.TemporaryDirectory(prefix="attempt-", dir=self._work, ignore_cleanup_errors=True)
        try:
            yield Path(folder.name)
        finally:
            await asyncio.shield(asyncio.to_thread(folder.cleanup))


@dataclass(slots=True)
class _Built:
    """The environment of a task, which one attempt builds while the others wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    root: Path | None = None
    failure: str | None = None
    """Why it could not be built or solved. That does not change while the run goes on."""


def _keep(folder: Path, kept: Path, *, everything: bool) -> None:
    """Keep the logs of an attempt, and the reward; or all of its files."""
    kept.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.*"):
        shutil.copy2(log, kept)
    if everything and (folder / "root").exists():
        with suppress(OSError):
            shutil.move(folder / "root", kept / "root")
