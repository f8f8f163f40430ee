"""The target of an audit, and its extent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import InvalidInputError

DEFAULT_CONVERSATIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTarget:
    """The template to audit, as the command line names it."""

    model: str | None = None
    """A folder or a hub's name; None for a template alone."""
    template: str | None = None
    """A file, or the name of one of the tokenizer's templates; None for the model's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    parser: str | None = None
    """The name of the format of completions; None to find it."""

    def __post_init__(self) -> None:
        if self.model is None and self.template is None:
            raise InvalidInputError("an audit must have a model, a template, or both, got neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """The extent of an audit."""

    seed: int = 0
    num_conversations: int = DEFAULT_CONVERSATIONS

    def __post_init__(self) -> None:
        if self.num_conversations < 1:
            raise InvalidInputError(f"num_conversations must be 1 or more, got {self.num_conversations}")
