"""What a step samples but does not train on: why, and whether trainer and sampler have one policy on it too (I9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unbroken.errors import RolloutError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import LoopConfig
from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.training.metrics.stats import mismatch_metrics
from unbroken.training.metrics.writer import Metrics
from unbroken.training.model.row_scores import RowScores
from unbroken.training.trainer import Trainer
from unbroken.types import Logprobs, TrainingSample

_REASONS = {
    "counters/status/timeout": "timed out",
    "counters/dropped_rows/failed": "failed",
    "counters/dropped_rows/aborted": "were aborted by the engine",
    "counters/dropped_rows/unscored": "have no score",
    "counters/dropped_rows/small_group": "have no sibling to compare with",
    "counters/dropped_rows/masked": "are masked, because a length limit cut them",
    "counters/dropped_rows/nothing_sampled": "sampled nothing",
}
"""The counters of rollouts that gave no row to train, and what they say of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroVariance:
    """The mismatch of rows that are sampled but not trained on, because every advantage of their group is zero.

    The trained rows are only a part of the sampled ones, and none once a task is solved. So some rows of the other
    groups are scored before the update, and count in `mismatch/kl` by the number of ids, over all processes:

        trained          300 ids, k3 2e-7
        zero variance    100 ids, of which 40 were scored: k3 6e-7
        mismatch/kl      (300 * 2e-7 + 100 * 6e-7) / 400 = 3e-7
    """

    num_tokens: int
    """Their loss tokens."""
    scored: Mismatch | None
    """Trainer against sampler on the rows that were scored; None if there were none."""

    def get_metrics(self, trained: Metrics) -> Metrics:
        """The metrics to log beside those of the rows that were trained on."""
        num_trained, k3 = trained["train/num_loss_tokens"] or 0, trained["mismatch/k3"] or 0.0
        all_k3: float | None = k3
        if self.num_tokens > 0:
            all_k3 = None
            if self.scored is not None:
                all_k3 = (num_trained * k3 + self.num_tokens * self.scored.k3) / (num_trained + self.num_tokens)
        return {
            "mismatch/kl": all_k3,
            "mismatch/num_zero_variance_tokens": self.num_tokens,
            "mismatch/zero_variance_k3": None if self.scored is None else self.scored.k3,
            "mismatch/zero_variance_max_abs": None if self.scored is None else self.scored.max_abs,
        }


@dataclass(slots=True, kw_only=True)
class UntrainedRows:
    """What a process samples in a step but does not train on: some of it is scored before the update (I9).

    A pass of a small model takes as long for 16 rows as for 8, so rows that are scored for another reason take these
    along:

        score(8 rows of a record)    one pass of 16 rows; the scores of the first 8
        compare()                    a pass for those that no `score` took along, and the mismatch of all
    """

    trainer: Trainer
    rows: Sequence[Sequence[TrainingSample]]
    """Those of each trajectory."""
    num_scored: int
    """Trajectories that are scored at most, evenly spread."""
    _scored: list[tuple[TrainingSample, Logprobs]] = field(init=False, default_factory=list)
    _left: list[TrainingSample] = field(init=False)
    """Rows that are not scored yet."""

    def __post_init__(self) -> None:
        chosen = self.rows[:: max(1, math.ceil(len(self.rows) / self.num_scored))] if self.num_scored > 0 else []
        self._left = [row for of_member in chosen for row in of_member]

    def score(self, others: Sequence[TrainingSample]) -> list[RowScores]:
        """Score other rows by `Trainer.score`, which every process calls, and take those of their temperature along."""
        first = next(iter([*others, *self._left]), None)
        beside = [row for row in self._left if first is not None and row.temperature == first.temperature]
        scores = self.trainer.score([*others, *beside])
        self._scored += [(row, of_row.logprobs) for row, of_row in zip(beside, scores[len(others) :], strict=True)]
        self._left = [row for row in self._left if first is not None and row.temperature != first.temperature]
        return scores[: len(others)]

    def compare(self) -> ZeroVariance:
        """Score what is left, and check that trainer and sampler have one policy on all that is scored.

        Blocks; every process calls it, before the update. Raises as `Trainer.check_policy` does.
        """
        if self.trainer.in_any_process(bool(self._left)):
            self._scored += zip(self._left, self.trainer.logprobs(self._left), strict=True)
            self._left = []
        if self.trainer.in_any_process(bool(self._scored)):
            self.trainer.check_policy([row for row, _ in self._scored], [of_row for _, of_row in self._scored])
        pairs = [(of_row[row.loss_mask], row.rollout_logprobs[row.loss_mask]) for row, of_row in self._scored]
        num_tokens = sum(int(row.loss_mask.sum()) for of_member in self.rows for row in of_member)
        everyone = self.trainer.from_all_processes((num_tokens, pairs))
        seen = [pair for _, of_process in everyone for pair in of_process]
        scored = mismatch(*(np.concatenate(side) for side in zip(*seen, strict=True))) if seen else None
        return ZeroVariance(num_tokens=sum(of_process for of_process, _ in everyone), scored=scored)


def compare_untrained(trainer: Trainer, groups: Sequence[TrajectoryGroup], *, num_scored: int) -> Metrics:
    """The mismatch of a step that trains nothing: its rollouts show as well whether both have one policy (I9).

    A sampler that speaks garbage earns no rewards, so no step would be trained, and none compared. Blocks; raises as
    `Trainer.check_policy` does.
    """
    rows = [
        [row for _, row in trajectory.tree.rows]
        for group in groups
        for trajectory in group.trajectories
        if trajectory.tree.rows
    ]
    rows = [of_one for of_one in rows if of_one[0].temperature == rows[0][0].temperature]  # as a pass has one
    found = UntrainedRows(trainer=trainer, rows=rows, num_scored=max(num_scored, 1)).compare()
    return {} if found.scored is None else {**mismatch_metrics(found.scored), "mismatch/kl": found.scored.k3}


def explain_empty(logged: Metrics) -> str:
    """Why a step trained nothing, in counts over all processes."""
    found = []
    if equal := logged["groups/num_zero_variance"]:
        compared, mean = logged["groups/num_compared"], logged["reward/mean"]
        found.append(f"{equal} of {compared} groups have equal rewards (the mean is {mean:.3g})")
    rollouts = logged["rollout/num_trajectories"]
    found += [f"{logged[name]} of {rollouts} rollouts {words}" for name, words in _REASONS.items() if logged.get(name)]
    if too_old := logged.get("sampler/num_dropped"):
        found.append(f"{too_old} groups were too old (max_staleness)")
    return "; ".join(found) or "there were no rollouts to train on"


def make_empty_error(reasons: str, config: LoopConfig, checkpoint: Path | None) -> RolloutError:
    """The error that ends a run after `max_empty_steps`; reasons and checkpoint are those of the last one."""
    model = "" if checkpoint is None else f"`unbroken export {checkpoint} MODEL` writes the model of the last step. "
    return RolloutError(
        f"{config.max_empty_steps} steps in a row trained nothing; of the last one, {reasons}. {model}"
        "Take problems that the policy solves sometimes, more rollouts of each (rollouts.group_size), or limits "
        "that let them end (rollouts.limits). "
        f"With loop.max_empty_steps none a run continues after such steps, and with {config.max_empty_steps} it ends"
    )
