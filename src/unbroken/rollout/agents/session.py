"""Agents and their tasks: what an agent gets for one attempt, what it returns, and environments that have tasks."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from unbroken.rollout.trajectory import TrajectoryGroup


class Preparation:
    """The seconds in which an attempt waits for what is no work of its agent.

    That is until a container has started, a folder is copied, or the agent's work is checked. They do not count for
    `Limits.timeout_s`: what is slow is no doing of the policy.
    """

    def __init__(self) -> None:
        """It has not begun."""
        self._ended_s = 0.0
        self._began: float | None = None

    def read(self) -> float:
        """Seconds until now."""
        return self._ended_s + (0.0 if self._began is None else time.perf_counter() - self._began)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time within."""
        self._began = time.perf_counter()
        try:
            yield
        finally:
            self._ended_s, self._began = self.read(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """One attempt: a task, and a model behind a URL and a key. All that the agent asks of it is recorded."""

    session_id: str
    api_key: str = field(repr=False)
    """It opens this session only."""
    openai_base_url: str = field(repr=False)
    """For OpenAI's SDK and compatible ones; it ends with `/v1`. It contains the key."""
    anthropic_base_url: str = field(repr=False)
    """For Anthropic's SDK and compatible ones, which add `/v1/messages`. It contains the key."""
    model: str
    """The name to ask for; any other name gets the same model."""
    task: Mapping[str, Any]
    """The row of the data set, or another description of the problem."""
    trajectory_id: str = ""
    """Of the trajectory that the attempt becomes."""
    preparation: Preparation = field(default_factory=Preparation, repr=False, compare=False)

    @property
    def gemini_base_url(self) -> str:
        """For Google's SDK and compatible ones, which add `/v1beta/models/...` to the same URL as Anthropic's."""
        return self.anthropic_base_url

    def environment(self) -> dict[str, str]:
        """The environment variables in which programs find the model and their task."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ANTHROPIC_API_KEY": self.api_key,
            "GOOGLE_GEMINI_BASE_URL": self.gemini_base_url,
            "GEMINI_API_KEY": self.api_key,
            "UNBROKEN_MODEL": self.model,
            "UNBROKEN_SESSION_ID": self.session_id,
            "UNBROKEN_TASK": json.dumps(self.task, default=str),
        }

    def fill(self, text: str, *, quoted: bool = False) -> str:
        """A text with its placeholders filled in, such as the value of an environment variable.

        They are `{model}`, `{openai_base_url}`, `{anthropic_base_url}`, `{gemini_base_url}`, `{api_key}`, and `{NAME}`
        for each text of the task, such as `{instruction}`. All other braces stay as they are. With `quoted`, values are
        escaped for the quotes of JSON and TOML that they stand in. URLs and key are not for the words of a command:
        other users of the machine can see these, and the URLs contain the key.
        """
        values = {name: value for name, value in self.task.items() if isinstance(value, str)}
        values |= {
            "model": self.model,
            "openai_base_url": self.openai_base_url,
            "anthropic_base_url": self.anthropic_base_url,
            "gemini_base_url": self.gemini_base_url,
            "api_key": self.api_key,
        }
        if quoted:
            values = {name: json.dumps(value)[1:-1] for name, value in values.items()}
        return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """A reward with the numbers behind it."""

    reward: float | None = None
    """None if a reward function or `finish` of the session gives it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name. They become `Trajectory.reward_parts`, whose means are logged, and are kept with the session."""
    failure: str | None = None
    """How the agent failed, if something else gave the reward nevertheless. Without any turn it is the attempt's error:
    an agent that never asked the model did not work at all, and its reward says nothing about the policy."""


Agent: TypeAlias = Callable[[AgentSession], Awaitable[float | AgentOutcome | None]]
"""Makes one attempt, and returns its reward, or None if a reward function over the conversation or `finish` of the
session gives it. An exception ends only this attempt, as FAILED."""
ScoreAttempts: TypeAlias = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]
"""Returns a group of attempts with their final rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """A problem for an agent."""

    agent: Agent
    task: Mapping[str, Any]
    """What the agent is given as `AgentSession.task`."""
    score: ScoreAttempts | None = None
    """For rewards that compare the attempts with each other: called once, after the last of them."""


class _TaskRows(Protocol):
    """The rows of an environment for training or for evaluation."""

    @property
    def source(self) -> str:
        """What says whether these are the rows of an earlier start of the run."""
        ...

    def __len__(self) -> int: ...

    def make_task(self, index: int) -> AgentTask:
        """A row as a task for a group of attempts, whose rollouts and rewards are the environment's."""
        ...


class TaskEnvironment(Protocol):
    """An environment of another package."""

    def rows(self, *, evaluation: bool) -> _TaskRows:
        """Its rows; raises `InvalidInputError` if there are none."""
        ...


def describe_rows(rows: Iterable[Mapping[str, Any]], *, num_rows: int, package: str) -> str:
    """The number of rows, and a digest of what is in them."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return f"{num_rows} rows of {package} {digest.hexdigest()[:16]}"
