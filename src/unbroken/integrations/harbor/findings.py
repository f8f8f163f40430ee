"""What a task asks for that cannot be had without its container: refused by name, or noted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError


@dataclass(slots=True)
class Findings:
    """Collects the notes on one task."""

    folder: Path
    accept: Collection[str] = ()
    """Names that are not refused: the user has seen to them in another way."""
    notes: list[str] = field(default_factory=list)

    def refuse(self, name: str, reason: str) -> None:
        """Refuse what the task has under this name, or note it if the user accepts that it is left out.

        Raises:
            InvalidInputError: the name is not accepted.
        """
        if name in self.accept:
            self.note(f"{name} is left out, as accepted: {reason}")
            return
        raise InvalidInputError(
            f"task {self.folder} has {name}: {reason}. Run it in containers (docs/environments.md), or leave it out on "
            f"purpose: environment_arguments.accept = [{name!r}]"
        )

    def note(self, note: str) -> None:
        """Note what does not hold here, and changes no reward by itself."""
        if note not in self.notes:
            self.notes.append(note)

    def fail(self, problem: str) -> InvalidInputError:
        """The error for what is wrong in any case."""
        return InvalidInputError(f"task {self.folder}: {problem}")
