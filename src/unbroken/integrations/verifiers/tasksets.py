"""Environments of verifiers 0.4: a taskset, and an agent with a harness that attempts its tasks.

The harness is a program of any kind. Its requests go through the interception server of verifiers, which relays them as
they are, in whichever dialect, to the session of the attempt. The tasks' own rewards and metrics count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import InvalidInputError, RewardError
from unbroken.integrations.verifiers.classic import AttemptError
from unbroken.rollout.agents.session import AgentOutcome, AgentSession, AgentTask, describe_rows

_NO_KEY = "UNBROKEN_SESSIONS_NEED_NO_KEY"
"""verifiers reads keys from the environment, which all attempts share. A session's URL opens it without a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetEnvironment:
    """An environment of verifiers 0.4."""

    config: Any
    """Its `EnvConfig`."""
    agent: str
    """The agent that is trained: the only one without its own client."""

    @classmethod
    def load(cls, name: str, arguments: Mapping[str, Any]) -> TasksetEnvironment:
        """Resolve the config of a taskset's environment.

        Raises:
            InvalidInputError: not exactly one of its agents would ask the run's model.
        """
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import resolve_env_config

        fields = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
        config = resolve_env_config(fields)
        agents = agent_config_fields(config)
        trained = [agent for agent, each in agents.items() if each.client is None]
        if len(trained) != 1:
            raise InvalidInputError(
                f"environment {name!r} must have exactly one agent without its own client, which is trained, got "
                f"{', '.join(trained) or 'none'} of {', '.join(agents)}: give the others a client in "
                "environment_arguments, such as {judge = {client = {base_url = ...}, model = ...}}"
            )
        return cls(config=config, agent=trained[0])

    def rows(self, *, evaluation: bool) -> _TasksetRows:
        """The tasks of its taskset, the same ones for training and evaluation."""
        from verifiers.v1.utils.loaders import load_taskset

        taskset = load_taskset(self.config.taskset)
        if not taskset.bounded:
            raise InvalidInputError(
                f"environment {self.config.taskset.id!r} cannot be trained on: its taskset is infinite"
            )
        tasks = list(taskset)
        if not tasks:
            raise InvalidInputError(f"environment {self.config.taskset.id!r} has no tasks")
        return _TasksetRows(self, tasks)

    async def attempt(self, task: Any, session: AgentSession) -> AgentOutcome:
        """Run one episode. Each has its own interception server, which keeps a client for each session.

        Raises:
            AttemptError: the environment, its agent or the scoring failed.
            RewardError: it has not exactly one rollout of the agent that is trained.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment

        client = EvalClientConfig(base_url=session.openai_base_url, api_key_var=_NO_KEY)
        environment = load_environment(self.config)
        async with environment.serving():
            episode = await environment.run_episode(task, ModelContext(model=session.model, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not say why"
            raise AttemptError(f"the episode failed: {last}")
        traces = [trace for trace in episode.traces if len(episode.traces) == 1 or trace.agent.name == self.agent]
        if len(traces) != 1:
            raise RewardError(
                f"an episode must have one rollout of the agent {self.agent!r}, got {len(traces)}: they would share a "
                "session and a reward"
            )
        return _read_outcome(traces[0])


class _TasksetRows:
    """The tasks of a taskset."""

    def __init__(self, environment: TasksetEnvironment, tasks: Sequence[Any]) -> None:
        """Take the tasks, which all attempts share."""
        self._environment = environment
        self._tasks = tasks
        self._rows = [task.data.model_dump(mode="json", exclude_none=True) for task in tasks]
        self.source = describe_rows(self._rows, num_rows=len(tasks), package="verifiers")

    def __len__(self) -> int:
        return len(self._tasks)

    def make_task(self, index: int) -> AgentTask:
        async def attempt(session: AgentSession) -> AgentOutcome:
            return await self._environment.attempt(self._tasks[index], session)

        return AgentTask(agent=attempt, task=self._rows[index])


def _read_outcome(trace: Any) -> AgentOutcome:
    """The reward of a trace, and each of its rewards and metrics by name."""
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return AgentOutcome(reward=trace.reward, metrics={**metrics, **rewards})
