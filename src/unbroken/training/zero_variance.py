"""The mismatch of rows that are sampled but not trained on, because every advantage of their group is zero.

The trained rows are only a part of the sampled ones, and none once a task is solved. So some rows of the other groups
are scored before the update, and count in `mismatch/kl` by the number of ids:

    trained          300 ids, k3 2e-7
    zero variance    100 ids, of which 40 were scored: k3 6e-7      mismatch/kl = (300 * 2e-7 + 100 * 6e-7) / 400 = 3e-7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.training.metrics.writer import Metrics
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroVariance:
    """The rows without an advantage that are not trained on, over all processes."""

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


def compare_zero_variance(
    trainer: Trainer, rows: Sequence[Sequence[TrainingSample]], *, num_scored: int
) -> ZeroVariance:
    """Score the rows of up to `num_scored` trajectories by `Trainer.logprobs`. Blocks; every process calls it."""
    evenly_spread = rows[:: max(1, math.ceil(len(rows) / num_scored))] if num_scored > 0 else []
    chosen = [row for of_member in evenly_spread for row in of_member]
    logprobs = trainer.logprobs(chosen) if trainer.in_any_process(bool(chosen)) else []
    pairs = [
        (of_row[row.loss_mask], row.rollout_logprobs[row.loss_mask])
        for row, of_row in zip(chosen, logprobs, strict=True)
    ]
    num_tokens = sum(int(row.loss_mask.sum()) for of_member in rows for row in of_member)
    everyone = trainer.from_all_processes((num_tokens, pairs))
    seen = [pair for _, of_process in everyone for pair in of_process]
    scored = mismatch(*(np.concatenate(side) for side in zip(*seen, strict=True))) if seen else None
    return ZeroVariance(num_tokens=sum(of_process for of_process, _ in everyone), scored=scored)
