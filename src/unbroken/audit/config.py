"""How much an audit tries."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.errors import InvalidInputError

DEFAULT_CONVERSATIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """How much is tried.

    Raises:
        InvalidInputError: there is no conversation to try.
    """

    seed: int = 0
    num_conversations: int = DEFAULT_CONVERSATIONS

    def __post_init__(self) -> None:
        if self.num_conversations < 1:
            raise InvalidInputError(f"num_conversations must be 1 or more, got {self.num_conversations}")
