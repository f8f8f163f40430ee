"""Environments of verifiers 0.1: `load_environment(NAME)`, a data set, `rollout` and a rubric.

The environment asks a model for each turn, by a client of OpenAI's chat dialect: ours goes to the session of the
attempt. So it keeps its own loop, tools, state and stop conditions, and the ids are those that the session records.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.numbers import to_finite_float32
from unbroken.rollout.agents.session import AgentOutcome, AgentSession, AgentTask, describe_rows
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus

_MODEL_ERRORS = frozenset(
    {"EmptyModelResponseError", "InvalidModelResponseError", "ToolError", "ToolParseError", "ToolCallError"}
)
"""Names of errors of verifiers that say what the model did. Its rubric scores such an attempt like any other."""


class AttemptError(Exception):
    """An environment of verifiers could not finish an attempt, through no fault of the model."""


class ClassicEnvironment:
    """An environment of verifiers 0.1."""

    def __init__(self, environment: Any, *, name: str) -> None:
        """Wrap a `verifiers.Environment`; raises `InvalidInputError` for one that only runs whole groups by itself."""
        self._environment = environment
        self._name = name
        if environment.requires_group_rollouts and hasattr(environment, "harness"):
            raise InvalidInputError(
                f"environment {name!r} cannot be trained on: its harness starts and scores whole groups by itself, and "
                "each attempt needs its own session"
            )

    def rows(self, *, evaluation: bool) -> _ClassicRows:
        """Its data set for training or evaluation; raises `InvalidInputError` if it has no such set."""
        environment = self._environment
        try:
            dataset = environment.get_eval_dataset() if evaluation else environment.get_dataset()
        except ValueError as error:
            raise InvalidInputError(f"environment {self._name!r} has no rows to train on: {error}") from error
        if len(dataset) == 0:
            raise InvalidInputError(f"environment {self._name!r} has no rows: its data set is empty")
        return _ClassicRows(environment, dataset)


class _ClassicRows:
    """The rows of an environment's data set."""

    def __init__(self, environment: Any, dataset: Any) -> None:
        """Take the data set as the environment has formatted it, with `prompt` and `example_id`."""
        self._environment = environment
        self._dataset = dataset
        self.source = describe_rows(dataset, num_rows=len(dataset), package="verifiers")

    def __len__(self) -> int:
        return len(self._dataset)

    def make_task(self, index: int) -> AgentTask:
        row = self._dataset[index]
        if not self._environment.requires_group_rollouts:
            return AgentTask(agent=_Attempt(environment=self._environment, row=row), task=row)
        attempts = _ComparedAttempts(environment=self._environment, row=row)
        return AgentTask(agent=attempts, task=row, score=attempts.score)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """Attempts a row, each time with its own state and reward."""

    environment: Any
    row: Mapping[str, Any]

    async def __call__(self, session: AgentSession) -> AgentOutcome:
        async with _open_client(session) as client:
            output = await self.environment.run_rollout(
                copy.deepcopy(self.row), client, session.model, copy.deepcopy(self.environment.sampling_args)
            )
        _check_error(output.get("error"))
        return _read_outcome(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedAttempts:
    """The attempts of a row by an environment with group rewards: its rubric scores them together."""

    environment: Any
    row: Mapping[str, Any]
    states: dict[str, Any] = field(default_factory=dict)
    """Of the attempts that ended by themselves, by the id of their trajectory."""

    async def __call__(self, session: AgentSession) -> None:
        async with _open_client(session) as client:
            state = await self.environment.rollout(
                copy.deepcopy(self.row), client, session.model, copy.deepcopy(self.environment.sampling_args)
            )
        _check_error(state.get("error"))
        self.states[session.trajectory_id] = state

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Let the rubric compare the attempts that were completed; the others keep what they have: a time-out 0."""
        scored = {
            each.trajectory_id: self.states[each.trajectory_id]
            for each in group.trajectories
            if each.status is TrajectoryStatus.COMPLETED
        }
        rubric = self.environment.rubric
        await rubric.score_group(list(scored.values()))
        for state in scored.values():
            await rubric.cleanup(state)
        outcomes = {name: _read_outcome(state) for name, state in scored.items()}
        return replace(
            group,
            trajectories=tuple(
                replace(
                    each, reward=outcomes[each.trajectory_id].reward, reward_parts=outcomes[each.trajectory_id].metrics
                )
                if each.trajectory_id in outcomes
                else each
                for each in group.trajectories
            ),
        )


@asynccontextmanager
async def _open_client(session: AgentSession) -> AsyncIterator[Any]:
    """A client of verifiers for the session. The limit of the whole attempt is the run's, so a turn has none."""
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    async with AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key, timeout=None) as client:
        yield OpenAIChatCompletionsClient(client)


def _check_error(error: Any) -> None:
    """Raise the error of a rollout, an exception or its description, unless the model made it."""
    if error is None:
        return
    is_exception = isinstance(error, BaseException)
    name = type(error).__name__ if is_exception else error["error"]
    if name in _MODEL_ERRORS:
        return
    if is_exception:
        raise AttemptError(f"{name}: {error}") from error
    raise AttemptError(str(error["error_chain_repr"]))


def _read_outcome(state: Mapping[str, Any]) -> AgentOutcome:
    """The reward and the metrics of a state, or of an output."""
    metrics = {
        name: to_finite_float32(value, name=f"metric {name!r} of the rubric", error=RewardError)
        for name, value in (state.get("metrics") or {}).items()
        if value is not None
    }
    reward = to_finite_float32(state.get("reward"), name="the rubric's reward", error=RewardError)
    return AgentOutcome(reward=reward, metrics=metrics)
