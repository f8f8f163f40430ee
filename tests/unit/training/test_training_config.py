"""Configs refuse what makes no sense, and say which field."""

from __future__ import annotations

import math

import pytest
import torch

from unbroken.errors import InvalidInputError
from unbroken.training.config import LoopConfig, OldLogprobs, OptimizerConfig, Schedule, TrainerConfig
from unbroken.training.loss_config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    KlConfig,
    KlEstimator,
    KlPlace,
    LossNormalization,
    OverlongConfig,
    TruncatedRows,
)
from unbroken.training.objective.advantages import TurnAdvantages, turn_grpo
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import PolicyGradient


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (ClipConfig, "low", 0.0),
        (ClipConfig, "low", 1.0),
        (ClipConfig, "high", -0.1),
        (ClipConfig, "high", math.inf),
        (OptimizerConfig, "learning_rate", 0.0),
        (OptimizerConfig, "learning_rate", math.nan),
        (OptimizerConfig, "weight_decay", -1.0),
        (OptimizerConfig, "betas", (0.9, 1.0)),
        (OptimizerConfig, "eps", 0.0),
        (OptimizerConfig, "max_grad_norm", 0.0),
        (OptimizerConfig, "max_grad_norm", math.nan),
        (OptimizerConfig, "warmup_updates", -1),
        (TrainerConfig, "old_logprobs", "sampler"),
        (TrainerConfig, "num_minibatches", 0),
        (TrainerConfig, "num_iterations", 0),
        (TrainerConfig, "tokens_per_micro_batch", 0),
        (TrainerConfig, "logprob_chunk_size", 0),
        (TrainerConfig, "image_cache_bytes", -1),
        (TrainerConfig, "seed", -1),
        (TrainerConfig, "normalization", "token"),
        (TrainerConfig, "kl", KlConfig(estimator=KlEstimator.K2)),
        (TrainerConfig, "truncated", "mask"),
        (TrainerConfig, "entropy_weight", -0.1),
        (ClipConfig, "dual", 1.0),
        (ClipConfig, "positive_temperature", 0.0),
        (ClipConfig, "negative_temperature", math.nan),
        (KlConfig, "estimator", "k3"),
        (KlConfig, "place", "reward"),
        (OptimizerConfig, "schedule", "cosine"),
        (OptimizerConfig, "decay_updates", 8),
        (OptimizerConfig, "final_share", 0.1),
        (TrainerConfig, "kl_weight", -0.1),
        (TrainerConfig, "kl_weight", math.inf),
        (TrainerConfig, "correction", Correction(kind=CorrectionKind.TOKEN_MASK)),
        (LoopConfig, "num_steps", -1),
    ],
)
def test_a_value_out_of_range_is_named(config, field, value):
    with pytest.raises(InvalidInputError, match=rf"^{config.__name__}\.{field} must be .*, got ") as raised:
        config(**{field: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("max_trajectory_tokens", [None, 0])
def test_constant_normalization_needs_a_constant(max_trajectory_tokens):
    with pytest.raises(InvalidInputError, match=r"max_trajectory_tokens must be >= 1 with LossNormalization.CONSTANT"):
        TrainerConfig(normalization=LossNormalization.CONSTANT, max_trajectory_tokens=max_trajectory_tokens)


def test_a_correction_on_top_of_the_samplers_ratio_is_refused_with_the_reason():
    correction = Correction(kind=CorrectionKind.TOKEN_TRUNCATE)
    with pytest.raises(InvalidInputError, match="SAMPLER, whose ratio is the correction already"):
        TrainerConfig(correction=correction)
    assert TrainerConfig(correction=correction, old_logprobs=OldLogprobs.RECOMPUTE).correction is correction


def test_a_constant_that_nothing_is_divided_by_is_refused():
    config = TrainerConfig(max_trajectory_tokens=8)
    with pytest.raises(InvalidInputError, match=r"CONSTANT, which divides by it, and None .* got 8 with to"):
        PolicyGradient().check_config(config)
    PolicyGradient(normalization=LossNormalization.CONSTANT).check_config(config)
    with pytest.raises(InvalidInputError, match=r"max_trajectory_tokens must be >= 1 .*, got None with constant"):
        PolicyGradient(normalization=LossNormalization.CONSTANT).check_config(TrainerConfig())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipConfig(high=3.0, dual=4.0), r"ClipConfig\.dual must be above 1 \+ high.*got 4\.0 with high=3\.0"),
        (
            lambda: KlConfig(estimator=KlEstimator.K3_RATIO_WEIGHTED, place=KlPlace.REWARD),
            "KlConfig.estimator must be k1, k2 or k3 in the reward.*got k3_ratio_weighted",
        ),
        (lambda: OverlongConfig(max_tokens=8, buffer=9), r"OverlongConfig\.buffer must be in \[1, max_tok.*8, got 9"),
        (lambda: OverlongConfig(max_tokens=8, buffer=2, penalty=0), r"OverlongConfig\.penalty must be finite and > 0"),
        (
            lambda: OptimizerConfig(schedule=Schedule.COSINE),
            r"decay_updates must be above warmup_updates \(0\) with a schedule that falls.*got None",
        ),
        (
            lambda: OptimizerConfig(schedule=Schedule.LINEAR, warmup_updates=5, decay_updates=5),
            r"decay_updates must be above warmup_updates \(5\).*got 5",
        ),
        (
            lambda: PolicyGradient(loss=LOSSES["sapo"]).check_config(TrainerConfig(clip=ClipConfig(low=0.1))),
            "TrainerConfig.clip.low must be left out with the loss sapo, which does not use it, got 0.1: it uses pos",
        ),
        (
            lambda: PolicyGradient(loss=LOSSES["cispo"]).check_config(TrainerConfig(clip=ClipConfig(dual=3.0))),
            "TrainerConfig.clip.dual must be left out with the loss cispo",
        ),
        (
            lambda: PolicyGradient().check_config(TrainerConfig(clip=ClipConfig(dual=1.2))),
            r"ClipConfig\.dual must be above 1 \+ high.*got 1\.2 with high=0\.28",
        ),
        (
            lambda: PolicyGradient(TurnAdvantages(turn_grpo), LOSSES["gspo"]).check_config(TrainerConfig()),
            "the loss gspo needs one advantage for a whole trajectory, and got advantages of turns: take gspo_token",
        ),
        (
            lambda: PolicyGradient(TurnAdvantages(turn_grpo)).check_config(
                TrainerConfig(kl_weight=0.1, kl=KlConfig(place=KlPlace.REWARD))
            ),
            "TrainerConfig.kl.place must be loss with advantages of turns, got reward",
        ),
        (
            lambda: PolicyGradient().check_config(
                TrainerConfig(kl_weight=0.1, kl=KlConfig(place=KlPlace.REWARD), truncated=TruncatedRows.MASK)
            ),
            "TrainerConfig.truncated must be train with kl.place reward, got mask",
        ),
    ],
)
def test_a_combination_without_meaning_is_refused_with_the_reason(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.CONSTANT, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (Schedule.LINEAR, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (Schedule.COSINE, [0.5, 1, 1, 0.85355339, 0.5, 0.14644661, 0, 0]),
    ],
)
@pytest.mark.parametrize("final_share", [0.0, 0.1])
def test_the_learning_rate_falls_by_its_schedule_after_the_warm_up(schedule, expected, final_share):
    falls = schedule is not Schedule.CONSTANT
    config = OptimizerConfig(
        learning_rate=2.0,
        warmup_updates=2,
        schedule=schedule,
        decay_updates=6 if falls else None,
        final_share=final_share if falls else 0.0,
    )
    warm = expected[:2]
    fallen = [final_share + (1 - final_share) * value if falls else value for value in expected[2:]]
    assert [config.learning_rate_at(k) for k in range(8)] == pytest.approx([2 * value for value in warm + fallen])


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
def test_the_schedules_are_those_of_transformers(schedule):
    transformers = pytest.importorskip("transformers")
    make = getattr(transformers, f"get_{schedule.value}_schedule_with_warmup")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = make(optimizer, num_warmup_steps=0, num_training_steps=9)
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, decay_updates=9)
    for k in range(12):
        if k < 9:
            assert config.learning_rate_at(k) == pytest.approx(theirs.get_last_lr()[0])
        else:
            assert config.learning_rate_at(k) == 0
        optimizer.step()
        theirs.step()


def test_the_learning_rate_rises_linearly_to_its_full_value():
    config = OptimizerConfig(learning_rate=1.0, warmup_updates=4)
    assert [config.learning_rate_at(k) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_learning_rate_is_full_at_once():
    assert OptimizerConfig(learning_rate=0.5).learning_rate_at(0) == 0.5


def test_stale_rows_get_a_clip_around_the_sampler_that_bounds_bad_ids_too():
    changed = PolicyGradient().for_stale_rows(TrainerConfig(num_minibatches=2, clip=ClipConfig(low=0.1)))
    assert (changed.old_logprobs, changed.correction, changed.num_minibatches) == (OldLogprobs.SAMPLER, None, 2)
    assert changed.clip == ClipConfig(low=0.1, high=0.28, dual=2.0)


@pytest.mark.parametrize("loss", ["gspo", "cispo", "sapo"])
def test_stale_rows_of_other_losses_get_truncated_importance_sampling(loss):
    changed = PolicyGradient(loss=LOSSES[loss]).for_stale_rows(TrainerConfig())
    assert (changed.old_logprobs, changed.correction) == (OldLogprobs.RECOMPUTE, Correction(kind=CorrectionKind.TIS))
    assert changed.clip == ClipConfig()


def test_stale_rows_are_corrected_as_the_config_says():
    corrected = PolicyGradient().for_stale_rows(TrainerConfig(old_logprobs=OldLogprobs.RECOMPUTE))
    assert corrected.correction == Correction(kind=CorrectionKind.TIS)
    for settings in (
        {"old_logprobs": OldLogprobs.SAMPLER},
        {"old_logprobs": OldLogprobs.RECOMPUTE, "correction": Correction()},
    ):
        config = TrainerConfig(**settings)
        assert PolicyGradient().for_stale_rows(config) == config
    assert OnlineDpo().for_stale_rows(TrainerConfig()) == TrainerConfig()
