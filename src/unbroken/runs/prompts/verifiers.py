"""Environments of the package verifiers in a config: `environment = "verifiers:NAME"` (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.integrations.verifiers import VerifiersEnvironment, load_environment
from unbroken.rollout.agents.session import AgentTask
from unbroken.rollout.order import EpochOrder
from unbroken.runs.collector import Problems

PREFIX = "verifiers:"


class VerifiersProblems:
    """Makes the problems of an environment of verifiers."""

    def __init__(self, reference: str, arguments: Mapping[str, Any], *, seed: int) -> None:
        """Load the environment `verifiers:NAME` with its arguments; raises `InvalidInputError` if that fails."""
        self._environment: VerifiersEnvironment = load_environment(reference.removeprefix(PREFIX), arguments)
        self._seed = seed

    def make(self, *, evaluation: bool) -> Problems:
        """Its rows as problems: for training in another order each epoch, for evaluation in theirs."""
        rows = self._environment.rows(evaluation=evaluation)
        order = EpochOrder(len(rows), seed=self._seed, shuffle=not evaluation)

        def make_task(number: int) -> AgentTask:
            return rows.make_task(order.index(number))

        return Problems(agent=make_task, source=rows.source, num_problems=len(rows))
