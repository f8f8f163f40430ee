"""The settings of a drift report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.types import SamplingParams

DEFAULT_CONVERSATIONS, DEFAULT_MAX_TURNS, DEFAULT_MAX_TOKENS = 64, 8, 512
EMBEDDED = "embedded"
DEMO_TASKS = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftConfig:
    """What is sampled, and how."""

    seed: int = 0
    num_conversations: int = DEFAULT_CONVERSATIONS
    max_turns: int = DEFAULT_MAX_TURNS
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Of one turn."""
    temperature: float = 1.0
    timeout_s: float = 600.0
    """Of one conversation."""
    scores: bool = True
    """Whether to compute ratios, which takes one scoring pass."""

    def __post_init__(self) -> None:
        for name in ("num_conversations", "max_turns", "max_tokens"):
            if (value := getattr(self, name)) < 1:
                raise InvalidInputError(f"{name} must be 1 or more, got {value}")
        if not 0 < self.timeout_s < math.inf:
            raise InvalidInputError(f"timeout_s must be a number of seconds, more than 0, got {self.timeout_s}")

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a turn; each conversation has its own seed."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Where conversations are sampled: the model in this process, or servers that run already."""

    urls: tuple[str, ...] = ()
    """Empty for the embedded engine."""
    api_key_file: Path | None = None

    @property
    def name(self) -> str:
        """The kind of the engine. Without URLs, since reports are passed on to others."""
        return "server" if self.urls else EMBEDDED
