"""The result of `unbroken drift` as one value, which is shown as text, JSON or HTML.

`DriftReport.to_json` is versioned: within a version fields are added, never renamed or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.audit.report import SideBySide, to_plain
from unbroken.retokenising.causes import Cause
from unbroken.training.metrics.mismatch import Mismatch

JSON_FORMAT, JSON_VERSION = "unbroken-drift", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What was sampled."""

    model: str
    engine: str
    """embedded or server."""
    parser: str
    template_sha256: str
    options: Mapping[str, Any]
    prompts: str
    """demo, lookup, or the name of a file."""
    num_conversations: int
    temperature: float
    max_tokens: int
    max_turns: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of rollouts, turns and sampled ids."""

    num_rollouts: int
    num_turns: int
    num_ids: int

    def get_shares(self, whole: Counts) -> dict[str, float]:
        """The shares of a whole; 0 of nothing."""
        return {
            "share_of_rollouts": _divide(self.num_rollouts, whole.num_rollouts),
            "share_of_turns": _divide(self.num_turns, whole.num_turns),
            "share_of_ids": _divide(self.num_ids, whole.num_ids),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A rollout that changed for a cause, id by id."""

    cause: Cause
    sides: SideBySide


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """What retokenising would have changed."""

    about: About
    compared: Counts
    changed: Counts
    """Rollouts and turns with other ids, and sampled ids that are not there any more."""
    causes: Mapping[Cause, Counts]
    """The same by cause, for all causes; a turn can have several."""
    num_failed: int
    """Conversations without a turn, because the engine or the template refused them."""
    num_refused: int
    """Conversations that the template refuses after they were parsed: the usual pipeline has no row for them."""
    num_turns_left_out: int
    """Turns that a fork left behind: they are in rows of their own, and not compared."""
    exact: Mismatch | None
    """The scoring pass over the ids as they were sampled: the engine's own rounding. None without scoring."""
    retokenised: Mismatch | None
    num_unscored: int
    """Rollouts that are too long for the engine once retokenised."""
    seconds: float
    examples: tuple[Example, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, as described in `docs/drift.md`. The examples are for the page only."""
        return {
            "format": JSON_FORMAT,
            "version": JSON_VERSION,
            "about": to_plain(self.about),
            "compared": to_plain(self.compared),
            "changed": self._describe(self.changed),
            "causes": {cause.value: self._describe(counts) for cause, counts in self.causes.items()},
            "num_failed": self.num_failed,
            "num_refused": self.num_refused,
            "num_turns_left_out": self.num_turns_left_out,
            "exact": to_plain(self.exact),
            "retokenised": to_plain(self.retokenised),
            "num_unscored": self.num_unscored,
            "seconds": round(self.seconds, 1),
        }

    def _describe(self, counts: Counts) -> dict[str, Any]:
        return {**to_plain(counts), **counts.get_shares(self.compared)}


def _divide(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
