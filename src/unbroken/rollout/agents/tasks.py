"""Environments of other packages as tasks for agents: rows, each of which an agent attempts in a session."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from unbroken.rollout.agents.session import AgentTask


class TaskRows(Protocol):
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

    def rows(self, *, evaluation: bool) -> TaskRows:
        """Its rows; raises `InvalidInputError` if there are none."""
        ...


def describe_rows(rows: Iterable[Mapping[str, Any]], *, num_rows: int, package: str) -> str:
    """The number of rows, and a digest of what is in them."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return f"{num_rows} rows of {package} {digest.hexdigest()[:16]}"
