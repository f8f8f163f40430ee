"""Finished rollouts beside what the usual pipeline makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.audit.subject import Subject
from unbroken.ledger.nodes import Origin, Path
from unbroken.retokenising.causes import Cause, Change, Turn
from unbroken.retokenising.pipeline import SampledTurn, UsualPipeline
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRollout:
    """The ids of a rollout, and those that the usual pipeline makes of it."""

    path: Path
    """What was sampled, and what was given between."""
    turns: tuple[Turn, ...]
    """The turns whose sampled ids are on the path: all, unless the rollout forked."""
    num_turns_left_out: int
    retokenised_ids: TokenIds
    changes: tuple[Change, ...]

    @property
    def differs(self) -> bool:
        """Whether the usual pipeline would train on other ids."""
        return bool(self.changes)

    @property
    def causes(self) -> frozenset[Cause]:
        """All causes of its changes."""
        return frozenset(cause for change in self.changes for cause in change.causes)

    def find_changes(self, turn: Turn) -> list[Change]:
        """The changes of one turn."""
        return [change for change in self.changes if turn.touches(change.gap)]

    def count_changed_ids(self, cause: Cause | None = None) -> int:
        """Count the sampled ids that are not there any more, for one cause or for any."""
        mask = self.path.sampled_mask
        changes = [change for change in self.changes if cause is None or cause in change.causes]
        return sum(int(mask[slice(*change.gap.before)].sum()) for change in changes)


def compare_rollout(subject: Subject, trajectory: Trajectory) -> ComparedRollout | None:
    """Compare a rollout of one turn or more; None if the template refuses the parsed conversation."""
    path = trajectory.tree.path(trajectory.turns[-1].end)
    turns = _find_turns(path, trajectory)
    found = UsualPipeline(subject).retokenise(
        path.token_ids.tolist(), turns, trajectory.messages, tools=trajectory.tools
    )
    if found is None:
        return None
    return ComparedRollout(
        path=path,
        turns=found.turns,
        num_turns_left_out=len(turns) - len(found.turns),
        retokenised_ids=found.token_ids,
        changes=found.changes,
    )


def _find_turns(path: Path, trajectory: Trajectory) -> list[SampledTurn]:
    """All turns of a rollout, those on the path with their place."""
    places = {segment.node: segment for segment in path.segments if segment.origin is Origin.SAMPLED}
    turns = []
    for turn in trajectory.turns:
        place = places.get(turn.end.node)
        turns.append(
            SampledTurn(
                completion_ids=turn.sequence.completion_ids,
                parsed=turn.parsed,
                message=turn.message,
                start=None if place is None else place.start,
                num_ids=0 if place is None else place.stop - place.start,
            )
        )
    return turns
