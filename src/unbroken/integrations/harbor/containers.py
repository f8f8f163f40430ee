"""Attempts of terminal tasks by the package harbor: each is a trial of it, with a session as the agent's model."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from unbroken.errors import InvalidInputError, TaskError
from unbroken.rollout.agents.session import Agent, AgentOutcome, AgentSession

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TIMEOUT, _EXIT = "AgentTimeoutError", "NonZeroAgentExitCodeError"
_OF_AGENT = frozenset({_TIMEOUT, _EXIT})
"""Exceptions of a trial after which its reward counts: what the agent did, which is verified."""


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

    @property
    def agent_class(self) -> dict[str, str]:
        """The field of Harbor's config that names the agent."""
        return {"import_path" if ":" in self.agent else "name": self.agent}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableTask:
    """A task that Harbor has read."""

    name: str
    folder: Path
    instruction: str
    agent_timeout_s: float | None
    """Seconds for the agent; None: no limit of its own."""
    attempt: Agent
    """Attempts it in a session, and verifies the attempt."""


class ContainerRunner:
    """Lets an agent of Harbor attempt tasks, each attempt a trial of Harbor."""

    def __init__(
        self,
        config: ContainerConfig,
        *,
        trials: Path,
        agent_timeout_s: float | None,
        reward: str,
    ) -> None:
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
        self._trials = trials
        self._agent_timeout_s = agent_timeout_s
        self._reward = reward
        try:
            self._models = importlib.import_module("harbor.models.trial.config")
            self._tasks = importlib.import_module("harbor.models.task.task")
            self._trial = importlib.import_module("harbor.trial.trial").Trial
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                "environment harbor:FOLDER needs the package harbor, with Python 3.12 or newer, and containers that it "
                f"can start, such as Docker's: pip install 'harbor>=0.25,<0.26', see docs/environments.md ({error})"
            ) from None

    def read(self, folder: Path) -> RunnableTask:
        """Let Harbor read a task; raises `InvalidInputError` if it cannot."""
        try:
            task = self._tasks.Task(folder)
        except Exception as error:  # whatever Harbor's models raise
            raise InvalidInputError(f"task {folder}: {type(error).__name__}: {error}") from error

        async def attempt(session: AgentSession) -> AgentOutcome:
            return await self.attempt(folder, session)

        return RunnableTask(
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
        trial = await self._trial.create(self.make_trial_config(folder, session))
        result = await trial.run()
        error = None if result.exception_info is None else result.exception_info.exception_type
        verified = result.verifier_result
        if (error is not None and error not in _OF_AGENT) or verified is None or not verified.rewards:
            message = "" if result.exception_info is None else result.exception_info.exception_message
            raise TaskError(f"task {folder}: Harbor's trial failed: {error or 'it gave no reward'}: {message[-2000:]}")
        try:
            reward, metrics = choose_reward(verified.rewards, self._reward)
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


def choose_reward(found: Mapping[str, Any], key: str) -> tuple[float, dict[str, float]]:
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
