"""What a step samples, and the gateway of agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.rollout.limits import Limits
from unbroken.types import SamplingParams, check_reproducible


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The rollouts of one step."""

    problems_per_step: int = 16
    """Groups in a step, over all processes."""
    group_size: int = 8
    """Trajectories of one problem, whose rewards are compared; 1 only with reinforce_plus_plus, which compares those of
    all problems."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Only the temperature may change the distribution: top-k, top-p, min-p, penalties and structured output are
    refused, because the trainer computes logprobs without them."""
    limits: Limits = field(default_factory=Limits)
    own_process: bool = False
    """Whether rollouts run in a process of their own, which is forked from the trainer's. Their Python (environments,
    tools, rewards, templates) then takes no time from the trainer's, above all with loop.max_staleness. For engine.kind
    started and server; rewards must not use a GPU in it."""

    def __post_init__(self) -> None:
        if self.problems_per_step < 1:
            raise InvalidInputError(f"problems_per_step must be >= 1, got {self.problems_per_step}")
        if self.group_size < 1:
            raise InvalidInputError(f"group_size must be >= 1, got {self.group_size}")
        check_reproducible(self.sampling, whose="the trainer's")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """The gateway that agents talk to (docs/gateway.md)."""

    url: str | None = None
    """Of a gateway that runs already, over the run's servers; none: one in this process, over the run's engine."""
    api_key_file: Path | None = None
    """A file with the key of the gateway at `url`, if it needs one."""
    store: str | None = None
    """Where the gateway in this process keeps its sessions, a folder or a postgresql:// URL; none: OUTPUT/sessions."""
    host: str = "127.0.0.1"
    """The address at which agents reach the gateway in this process."""

    def __post_init__(self) -> None:
        if self.url is not None and self.store is not None:
            raise InvalidInputError("sessions.store must be left out with sessions.url, got both")
        if self.url is None and self.api_key_file is not None:
            raise InvalidInputError("sessions.api_key_file must be left out without sessions.url")
