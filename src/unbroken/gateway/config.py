"""The gateway's own configuration, and what a session is created with.

`unbroken gateway --help` shows the docstrings of `GatewayConfig`'s fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from unbroken.errors import InvalidInputError
from unbroken.server.http.bodies import StrictBody


class OnDisconnect(StrEnum):
    """What happens to a turn whose reader leaves before its end."""

    FINISH = "finish"
    """It is sampled to its end and recorded: the agent will ask again, and gets it then."""
    ABORT = "abort"
    """It is aborted and not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits and defaults of all sessions, and whether their control API is open."""

    ttl_s: float = 24 * 3600.0
    """Seconds that a session lives, unless it is created with its own `ttl_s`."""
    max_sessions: int = 10_000
    """Maximum number of open sessions that are at work here; beyond it the answer is 429."""
    max_in_flight: int = 64
    """Maximum number of requests of one session at a time, unless its own limit is lower."""
    on_disconnect: OnDisconnect = OnDisconnect.FINISH
    """What happens to a turn whose reader leaves before its end, unless its session says otherwise: finish it and keep
    it for the agent's retry, or abort it."""
    no_control_key: bool = False
    """Take all calls, such as listing and deleting sessions, without a key. Otherwise a random one is made and shown at
    the start if --api-key is not given."""
    sweep_s: float = 30.0
    """Seconds between two searches for sessions whose time is over."""
    drain_s: float = 30.0
    """Seconds that turns without a reader have to finish once the server is stopped."""

    def __post_init__(self) -> None:
        for name in ("ttl_s", "max_sessions", "max_in_flight", "sweep_s"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be > 0, got {getattr(self, name)}")


class SessionSampling(StrictBody):
    """Sampling parameters that all turns of a session have, also against its agent; null leaves it to the agent.

    A trainer needs one temperature in all turns.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """Most ids of one turn. The agent may ask for fewer."""


class SessionLimits(StrictBody):
    """Where a session ends; null for no limit of its own."""

    turns: int | None = Field(default=None, ge=1)
    """Each of the `n` answers to a request is a turn."""
    tokens: int | None = Field(default=None, ge=1)
    """Sampled ids of all turns, those of aborted ones too. A request reserves its `max_tokens` for each of its answers,
    cut to what is left, until it ends."""
    seconds: float | None = Field(default=None, gt=0)
    """Since it was created."""
    in_flight: int | None = Field(default=None, ge=1)
    """Requests at the same time."""


class SessionSettings(StrictBody):
    """What a session is created with."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Kept and returned as it is, such as the task and the number of the attempt."""
    sampling: SessionSampling = Field(default_factory=SessionSampling)
    template_options: dict[str, Any] | None = None
    """`chat_template_kwargs` of all its requests; null leaves them to the agent."""
    limits: SessionLimits = Field(default_factory=SessionLimits)
    on_disconnect: OnDisconnect | None = Field(default=None, strict=False)
    """What happens to a turn whose reader leaves before its end; null for the gateway's default."""


class StoredSettings(SessionSettings):
    """What is stored of a session's settings."""

    model: str | None = None
    """The served model, whose tokenizer made the ids; null in sessions of releases that did not store it."""
