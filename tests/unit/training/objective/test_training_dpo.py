"""Updates on preference pairs, against one loss over all rows at once in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.largest_tensor import LargestTensor
from support.models import tiny_qwen3
from support.rows import random_pairs
from support.slow_logprobs import slow_logprobs
from unbroken.errors import InvalidInputError
from unbroken.training.config import OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.loss_config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    DpoConfig,
    LossNormalization,
    OverlongConfig,
    TruncatedRows,
)
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.pairs import PreferencePair
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer

BETA = 0.3


@pytest.fixture(scope="module")
def pairs() -> list[PreferencePair]:
    """Of one to three rows a side."""
    return random_pairs(np.random.default_rng(0), 4)


def make_trainer(**config) -> Trainer:
    defaults = {"dpo": DpoConfig(beta=BETA), "optimizer": SUBTRACT_GRADIENT, "tokens_per_micro_batch": 30}
    return Trainer(
        tiny_qwen3(), TrainerConfig(**{**defaults, **config}), objective=OnlineDpo(), reference=tiny_qwen3(seed=1)
    )


def slow_margins(model, reference, pairs) -> torch.Tensor:
    """[P] each pair's margin with gradient, all of its rows in one graph, in float64."""

    def log_ratio(rows) -> torch.Tensor:
        return torch.cat(slow_logprobs(model, rows)).sum() - torch.cat(slow_logprobs(reference, rows)).sum().detach()

    return torch.stack([log_ratio(pair.chosen) - log_ratio(pair.rejected) for pair in pairs])


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 30, 10_000])
def test_loss_and_gradient_are_those_of_all_rows_of_all_pairs_in_one_graph(pairs, tokens_per_micro_batch):
    model, trainer = tiny_qwen3(), make_trainer(tokens_per_micro_batch=tokens_per_micro_batch)
    margin_P = slow_margins(model, tiny_qwen3(seed=1), pairs)
    expected = -torch.log(1 / (1 + torch.exp(-BETA * margin_P))).mean()
    expected.backward()
    before = {name: weight.double() for name, weight in trainer.named_weights()}
    stats = trainer.step(pairs)
    assert stats.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in trainer.named_weights():
        assert float((before[name] - weight.double() - gradients[name]).abs().max()) / largest < 1e-4, name
    assert stats.objective.num_pairs == len(pairs)
    assert stats.objective.margin == pytest.approx(float(BETA * margin_P.detach().mean()), rel=1e-4)
    assert stats.objective.accuracy == float((margin_P > 0).double().mean())
    assert 0 < stats.objective.num_right < len(pairs)


def test_a_pair_stays_in_one_minibatch_and_margins_are_taken_anew_for_each(pairs):
    trainer = make_trainer(num_minibatches=2, optimizer=OptimizerConfig(learning_rate=1e-2))
    stats = trainer.step(pairs)
    assert stats.num_updates == 2
    assert stats.num_rows == sum(len(pair.rows) for pair in pairs)
    alone = make_trainer(optimizer=OptimizerConfig(learning_rate=1e-2)).step(pairs)
    assert stats.objective.num_pairs == alone.objective.num_pairs
    assert stats.objective.margin != pytest.approx(alone.objective.margin, rel=1e-3)


def test_steps_on_the_same_pairs_bring_their_margins_and_accuracy_up(pairs):
    trainer = make_trainer(optimizer=OptimizerConfig(learning_rate=3e-3))
    steps = [trainer.step(pairs) for _ in range(6)]
    margins = [stats.objective.margin for stats in steps]
    assert margins == sorted(margins)
    assert steps[-1].objective.accuracy == 1
    assert steps[-1].loss < steps[0].loss


def test_the_metrics_of_pairs_are_there_exactly_with_pairs(pairs):
    named = step_metrics(make_trainer().step(pairs))
    assert named["dpo/num_pairs"] == len(pairs)
    assert 0 < named["dpo/accuracy"] < 1
    assert named["train/reference_k3"] > 0
    rows = [row for pair in pairs for row in pair.rows]
    assert not [name for name in step_metrics(Trainer(tiny_qwen3(), TrainerConfig()).step(rows)) if "dpo" in name]


def test_units_of_another_objective_are_refused(pairs):
    with pytest.raises(
        InvalidInputError, match=r"units\[0\] must be a TrainingSample or TrajectoryRows with PolicyGradient, got"
    ):
        Trainer(tiny_qwen3(), TrainerConfig()).step(pairs)
    with pytest.raises(InvalidInputError, match=r"units\[1\] must be a PreferencePair with OnlineDpo, got TrainingS"):
        make_trainer().step([pairs[0], pairs[0].chosen[0]])


def test_dpo_without_a_reference_is_refused():
    with pytest.raises(InvalidInputError, match="got NoneType for one that needs it"):
        Trainer(tiny_qwen3(), TrainerConfig(), objective=OnlineDpo())


@pytest.mark.parametrize(
    "others",
    [
        {"kl_weight": 0.1},
        {"entropy_weight": 0.1},
        {"truncated": TruncatedRows.MASK},
        {"overlong": OverlongConfig(max_tokens=8, buffer=2)},
        {"clip": ClipConfig(low=0.1)},
        {"normalization": LossNormalization.TOKEN},
        {"old_logprobs": OldLogprobs.RECOMPUTE, "correction": Correction(kind=CorrectionKind.TOKEN_MASK)},
    ],
)
def test_what_belongs_to_the_policy_loss_is_refused_with_dpo(others):
    with pytest.raises(InvalidInputError, match=r"TrainerConfig\.\w+ must be left out with OnlineDpo, which does not"):
        make_trainer(**others)


def test_settings_of_dpo_are_refused_with_the_policy_gradient():
    with pytest.raises(InvalidInputError, match=r"TrainerConfig\.dpo must be None with PolicyGradient"):
        Trainer(tiny_qwen3(), TrainerConfig(dpo=DpoConfig()))


def test_a_beta_that_is_not_positive_is_refused():
    with pytest.raises(InvalidInputError, match=r"DpoConfig\.beta must be finite and > 0, got 0"):
        DpoConfig(beta=0)


def test_a_row_of_a_pair_is_refused_by_its_number_among_all_rows(pairs):
    late = replace(pairs[0], rejected=tuple(replace(row, temperature=0.5) for row in pairs[0].rejected))
    with pytest.raises(InvalidInputError, match=rf"samples\[{len(late.chosen)}\] was sampled at temperature 0.5"):
        make_trainer().step([late])


@pytest.mark.parametrize("objective", [PolicyGradient(), OnlineDpo()])
def test_no_tensor_of_a_step_holds_the_logits_of_all_its_loss_tokens(pairs, objective):
    """The largest is the embeddings' gradient; the loss tokens times the vocabulary would be twice that and more."""
    model, reference = tiny_qwen3(vocab_size=2048), tiny_qwen3(vocab_size=2048, seed=1)
    is_dpo = isinstance(objective, OnlineDpo)
    config = TrainerConfig(logprob_chunk_size=8)
    trainer = Trainer(model, config, objective=objective, reference=reference if is_dpo else None)
    samples = pairs if is_dpo else [row for pair in pairs for row in pair.rows]
    with LargestTensor() as largest:
        stats = trainer.step(samples)
    assert largest.numel == model.lm_head.weight.numel()
    assert 2 * largest.numel < stats.num_loss_tokens * 2048
