"""What a session is created with."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from unbroken.gateway.config import OnDisconnect
from unbroken.server.http.bodies import StrictBody


class SessionSampling(StrictBody):
    """Sampling parameters that all turns of a session have, whatever its agent asks for; null leaves it to the agent.

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
