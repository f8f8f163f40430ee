"""Configs refuse what makes no sense, and say which field."""

from __future__ import annotations

import math

import pytest

from unbroken.errors import InvalidInputError
from unbroken.training.config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    LoopConfig,
    LossNormalization,
    OldLogprobs,
    OptimizerConfig,
    TrainerConfig,
)


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
        (TrainerConfig, "tokens_per_micro_batch", 0),
        (TrainerConfig, "logprob_chunk_size", 0),
        (TrainerConfig, "image_cache_bytes", -1),
        (TrainerConfig, "seed", -1),
        (TrainerConfig, "normalization", "token"),
        (TrainerConfig, "max_trajectory_tokens", 8),
        (TrainerConfig, "kl_weight", -0.1),
        (TrainerConfig, "kl_weight", math.inf),
        (TrainerConfig, "correction", Correction(kind=CorrectionKind.TOKEN_MASK)),
        (LoopConfig, "num_steps", 0),
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


def test_the_learning_rate_rises_linearly_to_its_full_value():
    config = OptimizerConfig(learning_rate=1.0, warmup_updates=4)
    assert [config.learning_rate_at(k) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_learning_rate_is_full_at_once():
    assert OptimizerConfig(learning_rate=0.5).learning_rate_at(0) == 0.5
