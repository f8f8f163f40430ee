"""What the defaults clip and mask at weights that have not moved: sampler and trainer differ by rounding alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from support.models import tiny_qwen3
from support.rows import random_trajectories, row
from unbroken.runs.algorithms import Algorithm, Pairing, make_objective
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.training.model.batch import Batch, ScoredRow, collate
from unbroken.training.model.scores import TokenScores
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.trainer import Trainer

NOISES = [1e-5, 1e-4, 1e-3]
"""k3 of trainer and sampler. A sampler in bfloat16 is at 2e-5."""
MOST = 1_000
NUM_ROWS = 200


@functools.cache
def rows_with_noise(k3: float, *, num_ids: int | None = None) -> tuple[list[Any], list[np.ndarray]]:
    """Rows of up to `MOST` ids with advantages of both signs, and the trainer's logprobs of them.

    The noise has a deviation of sqrt(2 * k3) and a mean with which the probabilities of the ids that the sampler chose
    add up, so k3 is what was asked for.
    """
    rng = np.random.default_rng(0)
    rows, logprobs = [], []
    for k in range(NUM_ROWS if num_ids is None else NUM_ROWS * MOST // num_ids):
        length = num_ids or int(rng.integers(10, MOST + 1))
        made = row([1] * (length + 1), sampled=range(1, length + 1), advantage=1.0 if k % 2 else -1.0, logprob=-2.0)
        noise = rng.normal(-k3, math.sqrt(2 * k3), length + 1)
        rows.append(made)
        logprobs.append((made.rollout_logprobs + noise).astype(np.float32))
    return rows, logprobs


def measure(objective: Any, config: TrainerConfig, k3: float, **options: Any) -> tuple[float, float]:
    """The shares of ids that the loss clips and that the correction changes, by the loss of a forward pass."""
    rows, logprobs = rows_with_noise(k3, **options)
    is_own = objective.get_old_logprobs(config) is OldLogprobs.RECOMPUTE
    old = logprobs if is_own else [each.rollout_logprobs for each in rows]
    scored = [ScoredRow(sample=each, old_logprobs=values) for each, values in zip(rows, old, strict=True)]
    batch: Batch = collate([[each] for each in scored], [1.0] * len(rows), torch.device("cpu"))
    current = torch.from_numpy(np.concatenate([values[1:] for values in logprobs]))
    stats = objective.batch_loss(TokenScores(current, torch.zeros_like(current), None), batch, config).stats
    assert stats.num_tokens == sum(len(each.token_ids) - 1 for each in rows)
    return stats.clip_fraction, stats.corrected_fraction


@pytest.mark.parametrize("k3", NOISES)
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("name", Algorithm)
def test_no_default_clips_or_masks_more_than_a_hundredth_for_rounding_alone(name, max_staleness, k3):
    objective = make_objective(name, advantages=None, loss=None, pairs=Pairing.OUTSIDE_IN)
    config = TrainerConfig() if max_staleness == 0 else objective.for_stale_rows(TrainerConfig())
    assert max(measure(objective, config, k3)) <= 0.01


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_by_the_samplers_logprobs_gspo_would_clip_a_fifth_of_all_ids_at_the_rounding_of_bfloat16(name):
    assert measure(ALGORITHMS[name], TrainerConfig(old_logprobs=OldLogprobs.SAMPLER), 1e-4)[0] > 0.2


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_step_of_gspo_recomputes_the_old_logprobs_and_so_begins_unclipped(name, num_minibatches):
    config = TrainerConfig(num_minibatches=num_minibatches, tokens_per_micro_batch=40)
    trainer = Trainer(tiny_qwen3(), config, objective=ALGORITHMS[name])
    stats = trainer.step(random_trajectories(np.random.default_rng(0), 6))
    assert stats.mismatch.k3 > 0.1
    assert stats.mean_ratio == pytest.approx(1, abs=1e-3)
    assert stats.clip_fraction <= (num_minibatches - 1) / num_minibatches


@pytest.mark.parametrize("k3", NOISES)
@pytest.mark.parametrize("kind", [CorrectionKind.TIS, CorrectionKind.ICEPOP])
def test_corrections_of_single_ids_change_no_id_for_rounding_alone(kind, k3):
    config = TrainerConfig(old_logprobs=OldLogprobs.RECOMPUTE, correction=Correction(kind=kind))
    assert measure(PolicyGradient(), config, k3) == (0, 0)


@pytest.mark.parametrize(
    ("k3", "num_ids", "low", "high"),
    [
        (1e-5, 1_000, 0, 0),
        (4e-5, 1_000, 0, 0.01),
        (1e-4, 1_000, 0.02, 0.1),
        (1e-3, 40, 0, 0.01),
        (1e-3, 1_000, 0.1, 0.4),
    ],
)
@pytest.mark.parametrize("kind", [CorrectionKind.MIS, CorrectionKind.SEQUENCE_TRUNCATE])
def test_corrections_of_whole_trajectories_bear_k3_times_ids_of_0_04(kind, k3, num_ids, low, high):
    """Beyond, the product of so many ratios leaves 2 by rounding alone, which docs/algorithms.md says."""
    config = TrainerConfig(old_logprobs=OldLogprobs.RECOMPUTE, correction=Correction(kind=kind))
    _, corrected = measure(PolicyGradient(), config, k3, num_ids=num_ids)
    assert low <= corrected <= high
