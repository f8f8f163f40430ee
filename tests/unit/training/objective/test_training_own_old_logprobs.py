"""With one update a step, the trainer's logprobs before it are those of its own passes, which saves a pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.models import tiny_qwen3
from support.rows import random_trajectories
from unbroken.training.config import OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.loss_config import Correction, CorrectionKind, KlConfig, KlEstimator
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.trainer import Trainer


class ScoresFirst(PolicyGradient):
    """Has the old logprobs before the first pass, whether it needs them or not."""

    def needs_old_logprobs(self, config):
        return True


def update(objective, **config):
    passes = []
    model = tiny_qwen3()
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    config = {"old_logprobs": OldLogprobs.RECOMPUTE, **config}
    needs_reference = "kl_weight" in config
    trainer = Trainer(
        model,
        TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=40, **config),
        objective=objective,
        reference=tiny_qwen3(seed=1) if needs_reference else None,
    )
    model.model.register_forward_hook(lambda *_: passes.append(1))
    stats = trainer.step(random_trajectories(np.random.default_rng(0), 6))
    return dict(trainer.named_weights()), stats, len(passes)


@pytest.mark.parametrize(
    "config",
    [
        {"correction": Correction(kind=CorrectionKind.TIS)},
        {"correction": Correction(kind=CorrectionKind.ICEPOP)},
        {},
        {"kl_weight": 0.1, "kl": KlConfig(estimator=KlEstimator.K3_RATIO_WEIGHTED)},
    ],
)
def test_an_update_with_its_own_old_logprobs_is_that_with_recomputed_ones(config):
    weights, stats, num_passes = update(PolicyGradient(), **config)
    expected, with_scores, more = update(ScoresFirst(), **config)
    assert num_passes < more
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    assert stats.mean_ratio == 1
    assert stats.k3 == 0
    assert stats.corrected_fraction == with_scores.corrected_fraction
    assert stats.loss == pytest.approx(with_scores.loss, abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "config"),
    [
        (PolicyGradient(), {"num_minibatches": 2}),
        (PolicyGradient(), {"correction": Correction(kind=CorrectionKind.MIS)}),
        (ALGORITHMS["gspo"], {}),
    ],
)
def test_what_needs_them_before_the_first_pass_recomputes_them(objective, config):
    *_, with_scores = update(objective, **config)
    *_, without = update(objective, **{**config, "old_logprobs": OldLogprobs.SAMPLER, "correction": Correction()})
    assert with_scores > without
