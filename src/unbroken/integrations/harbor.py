"""Terminal tasks in Harbor's layout, attempted in containers by agents with sessions (docs/environments.md)."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import importlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from unbroken.errors import InvalidInputError, TaskError
from unbroken.rollout.agents.session import Agent, AgentOutcome, AgentSession, AgentTask, describe_rows
from unbroken.rollout.limits import is_duration

_log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TIMEOUT, _EXIT = "AgentTimeoutError", "NonZeroAgentExitCodeError"
_OF_AGENT = frozenset({_TIMEOUT, _EXIT})
"""Exceptions of a trial after which its reward counts: what the agent did, which is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationConfig:
    """How many containers are made, and what happens when that fails. Agents that run already are not limited."""

    at_once: int = 16
    """Containers in the making: built, started, and given their agent."""
    per_s: float = 4.0
    """Containers a second."""
    failures: int = 8
    """After so many failures in a row no other is made for `pause_s`, then one, and so on until one succeeds."""
    pause_s: float = 30.0
    wait_s: float = 900.0
    """Once none could be made for so long, attempts fail instead of waiting."""

    def __post_init__(self) -> None:
        for name in ("at_once", "failures"):
            if type(number := getattr(self, name)) is not int or number < 1:
                raise InvalidInputError(f"creation.{name} must be a whole number >= 1, got {number!r}")
        for name in ("per_s", "pause_s", "wait_s"):
            if not is_duration(value := getattr(self, name)):
                raise InvalidInputError(f"creation.{name} must be a finite number > 0, got {value!r}")


class Creations:
    """Lets containers be made as `CreationConfig` says."""

    def __init__(self, config: CreationConfig) -> None:
        """None was made yet."""
        self._config = config
        self._places = asyncio.Semaphore(config.at_once)
        self._order = asyncio.Lock()
        self._next_s = 0.0
        self._num_failures = 0
        self._broken_s = 0.0
        """When the last of `failures` failed."""

    @asynccontextmanager
    async def admit(self, session: AgentSession) -> AsyncIterator[Callable[..., Awaitable[None]]]:
        """Wait until a container may be made for an attempt; `TaskError` if none could for `wait_s`.

        The function that it gives is to be called when the agent starts: another container may be made then, and the
        attempt's time counts. Without that call, or a cancellation, the creation has failed.
        """
        with ExitStack() as releases:
            releases.enter_context(session.preparation.running())
            await self._wait(releases)
            is_done = False

            async def done(*_: object) -> None:
                nonlocal is_done
                if not is_done:
                    is_done = True
                    releases.close()
                    self._count_success()

            try:
                yield done
            except Exception:
                if not is_done:
                    self._count_failure()
                raise
            if not is_done:
                self._count_failure()

    async def _wait(self, releases: ExitStack) -> None:
        await self._places.acquire()
        releases.callback(self._places.release)
        async with self._order:
            while (left_s := self._next_s - time.monotonic()) > 0:
                if self._is_broken and time.monotonic() - self._broken_s > self._config.wait_s:
                    raise TaskError(
                        f"no container could be made for {self._config.wait_s:g} s (containers.creation.wait_s): "
                        f"{self._num_failures} failed in a row"
                    )
                await asyncio.sleep(min(left_s, 1.0))  # a success of another attempt ends the pause
            self._next_s = time.monotonic() + (self._config.pause_s if self._is_broken else 1 / self._config.per_s)

    @property
    def _is_broken(self) -> bool:
        return self._num_failures >= self._config.failures

    def _count_success(self) -> None:
        if self._is_broken:
            _log.warning("containers can be made again")
            self._next_s = 0.0
        self._num_failures = 0

    def _count_failure(self) -> None:
        self._num_failures += 1
        if self._num_failures == self._config.failures:
            pause_s = self._config.pause_s
            _log.warning("%d containers in a row failed: one is tried each %g s", self._num_failures, pause_s)
            self._broken_s = time.monotonic()
            self._next_s = self._broken_s + pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """The agent of Harbor that attempts tasks, and its containers."""

    agent: str = "mini-swe-agent"
    """An agent that Harbor knows, such as mini-swe-agent or codex, or module:Class."""
    model: str = "openai/{model}"
    """The model's name with the provider that the agent takes it for, such as anthropic/{model} for Claude Code.
    `AgentSession.fill` says what is filled in."""
    agent_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the agent in Harbor's config of a trial, such as `kwargs`. Values of `env` are filled in too."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the environment in Harbor's config of a trial, such as {type = "docker"}."""
    gateway_host: str | None = None
    """The name or address of this machine for the containers, such as 172.17.0.1; none: that of the gateway's URL."""
    creation: CreationConfig = field(default_factory=CreationConfig)

    @property
    def agent_class(self) -> dict[str, str]:
        """The field of Harbor's config that names the agent."""
        return {"import_path" if ":" in self.agent else "name": self.agent}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunnableTask:
    """A task that Harbor has read."""

    name: str
    folder: Path
    instruction: str
    agent_timeout_s: float | None
    """Seconds for the agent; None: no limit."""
    attempt: Agent
    """Attempts it in a session, and verifies the attempt."""


class ContainerRunner:
    """Lets an agent of Harbor attempt tasks, each attempt a trial of Harbor."""

    def __init__(self, config: ContainerConfig, *, trials: Path, agent_timeout_s: float | None, reward: str) -> None:
        """Import harbor.

        Args:
            config: the agent and its environment.
            trials: where Harbor keeps the folders of its trials, by the ids of their sessions.
            agent_timeout_s: instead of the tasks' own.
            reward: the number of a verifier that is the reward.

        Raises:
            InvalidInputError: harbor is not installed, or a field is not one of its config.
        """
        self._config = config
        self._creations = Creations(config.creation)
        self._trials = trials
        self._agent_timeout_s = agent_timeout_s
        self._reward = reward
        try:
            self._models = importlib.import_module("harbor.models.trial.config")
            self._tasks = importlib.import_module("harbor.models.task.task")
            self._trial = importlib.import_module("harbor.trial.trial").Trial
            self._agent_start = importlib.import_module("harbor.trial.hooks").TrialEvent.AGENT_START
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                "environment harbor:FOLDER needs the package harbor, with Python 3.12 or newer, and containers that it "
                f"can start, such as Docker's: pip install 'harbor>=0.25,<0.26', see docs/environments.md ({error})"
            ) from None

    def read(self, folder: Path) -> _RunnableTask:
        """Let Harbor read a task; raises `InvalidInputError` if it cannot."""
        try:
            task = self._tasks.Task(folder)
        except Exception as error:  # Harbor's models may raise anything
            raise InvalidInputError(f"task {folder}: {type(error).__name__}: {error}") from error

        async def attempt(session: AgentSession) -> AgentOutcome:
            return await self.attempt(folder, session)

        return _RunnableTask(
            name=task.name,
            folder=folder,
            instruction=task.instruction,
            agent_timeout_s=self._agent_timeout_s or task.config.agent.timeout_sec,
            attempt=attempt,
        )

    async def attempt(self, folder: Path, session: AgentSession) -> AgentOutcome:
        """Run a trial.

        Raises:
            TaskError: the containers, the agent's installation or the verifier failed.
            InvalidInputError: a container cannot reach the gateway, or a field is not one of Harbor's config.
        """
        config = self.make_trial_config(folder, session)
        async with self._creations.admit(session) as start:
            trial = await self._trial.create(config)
            trial.add_hook(self._agent_start, start)
            result = await trial.run()
        error = None if result.exception_info is None else result.exception_info.exception_type
        verified = result.verifier_result
        if (error is not None and error not in _OF_AGENT) or verified is None or not verified.rewards:
            message = "" if result.exception_info is None else result.exception_info.exception_message
            raise TaskError(f"task {folder}: Harbor's trial failed: {error or 'it gave no reward'}: {message[-2000:]}")
        try:
            reward, metrics = _choose_reward(verified.rewards, self._reward)
        except ValueError as wrong:
            raise TaskError(f"task {folder}: {wrong}") from None
        failures = {"agent_timed_out": float(error == _TIMEOUT), "agent_failed": float(error == _EXIT)}
        return AgentOutcome(reward=reward, metrics={**failures, **metrics})

    def make_trial_config(self, folder: Path, session: AgentSession) -> Any:
        """Harbor's config of an attempt; raises as `attempt` does."""
        session = move_session(session, self._config.gateway_host)
        options = dict(self._config.agent_options)
        variables = {name: session.fill(value) for name, value in options.pop("env", {}).items()}
        own = session.environment()
        del own["UNBROKEN_TASK"]  # Harbor gives the agent its instruction
        try:
            return self._models.TrialConfig(
                task=self._models.TaskConfig(path=folder),
                trial_name=session.session_id,
                trials_dir=self._trials,
                agent=self._models.AgentConfig(
                    model_name=session.fill(self._config.model),
                    env={"OPENAI_API_BASE": session.openai_base_url, **variables, **own},
                    override_timeout_sec=self._agent_timeout_s,
                    **self._config.agent_class,
                    **options,
                ),
                environment=self._models.EnvironmentConfig(**self._config.environment),
            )
        except (TypeError, ValueError) as error:  # pydantic's, too; TypeError: a field that is set here
            raise InvalidInputError(f"environment_arguments.containers must be as Harbor's config: {error}") from error


def move_session(session: AgentSession, host: str | None) -> AgentSession:
    """The session by the URLs that containers use; raises `InvalidInputError` for a gateway on the loopback alone."""
    if host is None and urlsplit(session.openai_base_url).hostname in _LOOPBACK:
        raise InvalidInputError(
            f"containers cannot reach the gateway at {session.openai_base_url.partition('/s/')[0]}: set sessions.host "
            'to "0.0.0.0" and environment_arguments.containers.gateway_host to the address of this machine for them, '
            "such as 172.17.0.1 with Docker"
        )
    if host is None:
        return session
    return replace(
        session,
        openai_base_url=_move(session.openai_base_url, host),
        anthropic_base_url=_move(session.anthropic_base_url, host),
    )


def _move(url: str, host: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}"))


def _choose_reward(found: Mapping[str, Any], key: str) -> tuple[float, dict[str, float]]:
    """The number named `key`, and the others as metrics; raises `ValueError` if one is missing or not finite."""
    numbers = {str(name): _check_reward(value) for name, value in found.items()}
    if key not in numbers:
        raise ValueError(
            f"it must have {key!r}, or environment_arguments.reward must name one of {', '.join(numbers) or 'none'}"
        )
    return numbers.pop(key), numbers


def _check_reward(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, got {repr(value)[:100]}")
    return number


_MAX_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalConfig:
    """How tasks are run: the fields of `environment_arguments`."""

    containers: ContainerConfig = field(default_factory=ContainerConfig)
    agent_timeout_s: float | None = None
    """Seconds for the agent, instead of the task's agent.timeout_sec."""
    reward: str = "reward"
    """The number of a reward.json that is the reward; the others are metrics."""
    tasks: tuple[str, ...] = ()
    """Patterns of the names of task folders, such as `sort-*`; empty: all."""
    evaluation: Path | None = None
    """The folder of tasks to evaluate on, relative to the folder of tasks; none: the same tasks."""
    evaluation_tasks: tuple[str, ...] = ()
    """Patterns of the names of the tasks to evaluate on; without `evaluation`, they are not trained on."""

    def __post_init__(self) -> None:
        if self.agent_timeout_s is not None and not is_duration(self.agent_timeout_s):
            raise InvalidInputError(
                f"agent_timeout_s must be a finite number of seconds > 0, got {self.agent_timeout_s!r}"
            )


class TerminalTasks:
    """The tasks of a folder, for training and for evaluation."""

    def __init__(
        self, folder: Path, read: Callable[[Path], _RunnableTask], config: TerminalConfig, *, max_attempt_s: float
    ) -> None:
        """Take the folder of a data set, or of one task.

        Args:
            folder: the folder.
            read: reads the task in a folder (`ContainerRunner.read`).
            config: which tasks are meant.
            max_attempt_s: how long the run lets an attempt take. An agent that is given longer would never be verified.
        """
        self._folder = folder
        self._read = read
        self._config = config
        self._max_attempt_s = max_attempt_s

    def rows(self, *, evaluation: bool) -> _TerminalRows:
        """Read the tasks.

        Raises:
            InvalidInputError: the folder has no tasks, or one cannot be run.
        """
        folders = self._find_evaluated() if evaluation else self._find_trained()
        tasks = [self._read(folder) for folder in folders]
        for task in tasks:
            self._check_time(task)
        return _TerminalRows(tasks)

    def _find_evaluated(self) -> list[Path]:
        config = self._config
        if config.evaluation is not None:
            return find_task_folders(self._folder / config.evaluation, names=config.evaluation_tasks)
        return find_task_folders(self._folder, names=config.evaluation_tasks or config.tasks)

    def _find_trained(self) -> list[Path]:
        config = self._config
        found = find_task_folders(self._folder, names=config.tasks)
        if config.evaluation is not None or not config.evaluation_tasks:
            return found
        held_out = self._find_evaluated()
        left = [folder for folder in found if folder not in held_out]
        if not left:
            raise InvalidInputError("evaluation_tasks must leave tasks to train on, but match all of them")
        return left

    def _check_time(self, task: _RunnableTask) -> None:
        limit = task.agent_timeout_s
        if limit is not None and limit >= self._max_attempt_s:
            raise InvalidInputError(
                f"rollouts.limits.timeout_s must be longer than the agent of task {task.folder} may take, "
                f"{limit:g} s, and leave time to verify what it did, got {self._max_attempt_s:g}: make it longer, or "
                "set environment_arguments.agent_timeout_s"
            )


class _TerminalRows:
    """Tasks as rows."""

    def __init__(self, tasks: Sequence[_RunnableTask]) -> None:
        """Take the tasks."""
        self._tasks = tasks
        rows = [{"name": task.folder.name, "files": describe_files(task.folder)} for task in tasks]
        self.source = describe_rows(rows, num_rows=len(rows), package="harbor")

    def __len__(self) -> int:
        return len(self._tasks)

    def make_task(self, index: int) -> AgentTask:
        task = self._tasks[index]
        return AgentTask(agent=task.attempt, task={"task": task.name, "instruction": task.instruction})


def _is_named(folder: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(folder.name, pattern) for pattern in patterns)


def find_task_folders(folder: Path, *, names: Sequence[str] = ()) -> list[Path]:
    """The folders of the tasks of a data set, in the order of their names, or of the one task that `folder` is.

    `names` are patterns such as `sort-*`; without any, all tasks are meant.

    Raises:
        InvalidInputError: there is no task.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"environment must be harbor:FOLDER, a folder of tasks, got {folder}: no such folder")
    found = [folder] if _is_task(folder) else sorted(each for each in folder.iterdir() if _is_task(each))
    chosen = [each for each in found if not names or _is_named(each, names)]
    if not chosen:
        wanted = f" with a name like {', '.join(names)}" if names else ""
        raise InvalidInputError(f"environment must be harbor:FOLDER, but {folder} has no task{wanted}: no task.toml")
    return chosen


def describe_files(folder: Path) -> str:
    """A digest of a task's files; of large ones only the length counts."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        digest.update(file.read_bytes() if size <= _MAX_HASHED_BYTES else b"")
    return digest.hexdigest()[:16]


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()
