"""The update of the same rows by TRL's GRPOTrainer and by ours: one loss, one gradient.

TRL computes its advantages, its correction and its loss by itself, from ids, logprobs and rewards.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.rows import random_rows
from support.trl_runs import IGNORED_WARNINGS
from unbroken.demo.model import build_model, build_tokenizer
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.loss_config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    KlConfig,
    KlEstimator,
    LossNormalization,
)
from unbroken.training.metrics.stats import StepStats
from unbroken.training.objective.advantages import grpo_advantages
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

pytest.importorskip("trl", reason="needs TRL", exc_type=ModuleNotFoundError)
pytestmark = [pytest.mark.filterwarnings(warning) for warning in IGNORED_WARNINGS]

GROUP_SIZE = 4
LONGEST = 20
REWARDS = [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 2.0, 1.0]
KL_WEIGHT = 0.3
CLIP = ClipConfig(low=0.15, high=0.3)
CORRECTION = Correction(low=0.5, high=1.5)
LOSS_TYPES = {
    LossNormalization.SEQUENCE: "grpo",
    LossNormalization.TOKEN: "dapo",
    LossNormalization.CONSTANT: "dr_grpo",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> list[TrainingSample]:
    """Two groups of four, with the advantages of `REWARDS`, sampled by a policy some way from the model."""
    rng = np.random.default_rng(7)
    drawn = random_rows(rng, len(REWARDS), longest=LONGEST)
    logprobs = Trainer(build_model(tokenizer, seed=0), TrainerConfig()).logprobs(drawn)
    groups = [REWARDS[:GROUP_SIZE], REWARDS[GROUP_SIZE:]]
    advantages = np.concatenate([grpo_advantages(rewards, normalize=False) for rewards in groups])
    return [
        replace(
            row,
            rollout_logprobs=(computed + rng.normal(0, 0.3, len(computed))).astype(np.float32),
            advantages=np.where(row.loss_mask, advantage, 0),
        )
        for row, computed, advantage in zip(drawn, logprobs, advantages, strict=True)
    ]


def as_trl_takes_them(rows: list[TrainingSample]) -> dict[str, list[Any]]:
    starts = [int(np.flatnonzero(row.sampled_mask)[0]) for row in rows]
    parts = [(row, slice(start, None)) for row, start in zip(rows, starts, strict=True)]
    return {
        "prompt_ids": [row.token_ids[:start].tolist() for row, start in zip(rows, starts, strict=True)],
        "completion_ids": [row.token_ids[rest].tolist() for row, rest in parts],
        "env_mask": [row.loss_mask[rest].astype(int).tolist() for row, rest in parts],
        "logprobs": [row.rollout_logprobs[rest].tolist() for row, rest in parts],
    }


def rewarded(**_: Any) -> list[float]:
    return REWARDS


@pytest.fixture
def grpo_trainer(tmp_path: Path, rows: list[TrainingSample], tokenizer: Any) -> Callable[..., Any]:
    """Makes a trainer of TRL that will be given the rows."""
    return functools.partial(_grpo_trainer, tmp_path, rows, tokenizer)


def _grpo_trainer(folder: Path, rows: list[TrainingSample], tokenizer: Any, **config: Any) -> Any:
    with warnings.catch_warnings():  # of what TRL imports
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer
    from datasets import Dataset

    fixed = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(rows),
        "num_generations": GROUP_SIZE,
        "max_completion_length": LONGEST,
        "epsilon": CLIP.low,
        "epsilon_high": CLIP.high,
        "scale_rewards": "none",
        "report_to": "none",
    }
    trainer = GRPOTrainer(
        build_model(tokenizer, seed=0),
        rewarded,
        args=GRPOConfig(**{**fixed, **config}),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
        rollout_func=lambda prompts, trainer: as_trl_takes_them(rows),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # which `train` sets
    return trainer


def update_of(trainer: Any, inputs: dict[str, torch.Tensor]) -> SimpleNamespace:
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    return SimpleNamespace(loss=loss.item(), gradients=gradients)


def expect_same_update(
    theirs: SimpleNamespace,
    rows: list[Any],
    tokenizer: Any,
    reference: Any = None,
    loss: str = "clipped",
    **config: Any,
) -> StepStats:
    constant = config["normalization"] is LossNormalization.CONSTANT
    config = {"clip": CLIP, **config}
    trainer = Trainer(
        build_model(tokenizer, seed=0),
        TrainerConfig(
            optimizer=SUBTRACT_GRADIENT,
            max_trajectory_tokens=LONGEST if constant else None,
            tokens_per_micro_batch=50,
            **config,
        ),
        objective=PolicyGradient(loss=replace(LOSSES[loss], old_logprobs=OldLogprobs.SAMPLER)),
        reference=reference,
    )
    before = {name: weight.clone() for name, weight in trainer.named_weights()}
    stats = trainer.step(rows)
    assert stats.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
    for name, weight in trainer.named_weights():
        gradient = theirs.gradients[name]
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(before[name] - weight, gradient, atol=2e-6, rtol=1e-3, msg=name)
    return stats


@pytest.mark.parametrize("normalization", LOSS_TYPES)
def test_the_clipped_loss_and_its_gradient_are_trls(rows, tokenizer, grpo_trainer, normalization):
    """Against the sampler's logprobs, which TRL is given as its old ones."""
    trainer = grpo_trainer(loss_type=LOSS_TYPES[normalization])
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"].nan_to_num()
    stats = expect_same_update(update_of(trainer, inputs), rows, tokenizer, normalization=normalization)
    assert 0.1 < stats.clip_fraction < 0.9


@pytest.mark.parametrize("normalization", LOSS_TYPES)
def test_a_group_of_equal_rewards_counts_in_trls_divisor_and_in_ours(
    rows, tokenizer, grpo_trainer, monkeypatch, normalization
):
    """Without its share the gradient would be about twice as large."""
    monkeypatch.setitem(globals(), "REWARDS", REWARDS[:GROUP_SIZE] + [1.0] * GROUP_SIZE)
    trainer = grpo_trainer(loss_type=LOSS_TYPES[normalization])
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"].nan_to_num()
    idle = [TrajectoryRows(rows=(), idle_rows=(row,)) for row in rows[GROUP_SIZE:]]
    expect_same_update(update_of(trainer, inputs), [*rows[:GROUP_SIZE], *idle], tokenizer, normalization=normalization)


@pytest.mark.parametrize(
    ("loss", "normalization", "clip", "theirs"),
    [
        (
            "gspo",
            LossNormalization.SEQUENCE,
            ClipConfig(low=0.02, high=0.03),
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
        ),
        # TRL's epsilon_high is the bound itself.
        ("cispo", LossNormalization.TOKEN, ClipConfig(high=0.4), {"loss_type": "cispo", "epsilon_high": 1.4}),
        (
            "sapo",
            LossNormalization.SEQUENCE,
            ClipConfig(positive_temperature=1.5, negative_temperature=2.0),
            {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0},
        ),
        ("clipped", LossNormalization.TOKEN, replace(CLIP, dual=1.35), {"loss_type": "dapo", "delta": 1.35}),
    ],
)
def test_the_losses_of_other_names_are_trls(rows, tokenizer, grpo_trainer, loss, normalization, clip, theirs):
    trainer = grpo_trainer(**theirs)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"].nan_to_num()
    update = update_of(trainer, inputs)
    expect_same_update(update, rows, tokenizer, loss=loss, normalization=normalization, clip=clip)


def test_the_entropy_bonus_is_trls_where_tokens_weigh_the_same(rows, tokenizer, grpo_trainer):
    """TRL's is a mean over tokens whatever the loss is normalized by."""
    trainer = grpo_trainer(loss_type="dapo", entropy_coef=0.2)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"].nan_to_num()
    update = update_of(trainer, inputs)
    expect_same_update(update, rows, tokenizer, normalization=LossNormalization.TOKEN, entropy_weight=0.2)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("normalization", LOSS_TYPES)
def test_the_pull_of_a_reference_is_trls(rows, tokenizer, grpo_trainer, normalization, is_weighted):
    """As GRPO has it, and multiplied by the ratio (`use_bias_correction_kl`)."""
    reference = build_model(tokenizer, seed=1)
    trainer = grpo_trainer(loss_type=LOSS_TYPES[normalization], use_bias_correction_kl=is_weighted)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"].nan_to_num()
    trainer.beta = KL_WEIGHT
    ours = Trainer(build_model(tokenizer, seed=1), TrainerConfig()).logprobs(rows)
    inputs["ref_per_token_logps"] = torch.zeros_like(inputs["old_per_token_logps"])
    for k, (row, logprobs) in enumerate(zip(rows, ours, strict=True)):
        rest = logprobs[int(np.flatnonzero(row.sampled_mask)[0]) :]
        inputs["ref_per_token_logps"][k, : len(rest)] = torch.from_numpy(np.nan_to_num(rest))
    theirs = update_of(trainer, inputs)
    kl = KlConfig(estimator=KlEstimator.K3_RATIO_WEIGHTED if is_weighted else KlEstimator.K3)
    expect_same_update(theirs, rows, tokenizer, reference, normalization=normalization, kl_weight=KL_WEIGHT, kl=kl)


@pytest.mark.parametrize(
    ("normalization", "kind"),
    [
        (LossNormalization.TOKEN, CorrectionKind.TOKEN_TRUNCATE),
        (LossNormalization.SEQUENCE, CorrectionKind.TOKEN_MASK),
        (LossNormalization.CONSTANT, CorrectionKind.SEQUENCE_MASK),
        (LossNormalization.SEQUENCE, CorrectionKind.SEQUENCE_TRUNCATE),
    ],
)
def test_the_correction_for_the_sampler_is_trls(rows, tokenizer, grpo_trainer, normalization, kind):
    """TRL makes it with `use_vllm` only: that is set once its trainer is built, so that it starts no vLLM."""
    trainer = grpo_trainer(
        loss_type=LOSS_TYPES[normalization],
        vllm_importance_sampling_mode=kind.value,
        vllm_importance_sampling_clip_max=CORRECTION.high,
        vllm_importance_sampling_clip_min=CORRECTION.low if kind.value.endswith("mask") else None,
    )
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    stats = expect_same_update(
        update_of(trainer, inputs),
        rows,
        tokenizer,
        normalization=normalization,
        old_logprobs=OldLogprobs.RECOMPUTE,
        correction=replace(CORRECTION, kind=kind),
    )
    assert 0 < stats.corrected_fraction < 1


def test_trls_scaled_advantages_are_ours_up_to_its_deviation_of_a_sample(rows, grpo_trainer):
    """TRL divides by the deviation with Bessel's correction plus 1e-4, and we by the population's."""
    trainer = grpo_trainer(scale_rewards="group")
    theirs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))["advantages"].reshape(2, -1)
    for rewards, advantages in zip([REWARDS[:GROUP_SIZE], REWARDS[GROUP_SIZE:]], theirs.numpy(), strict=True):
        ours = grpo_advantages(rewards) * np.std(rewards) / (np.std(rewards, ddof=1) + 1e-4)
        np.testing.assert_allclose(advantages, ours, rtol=1e-5)
