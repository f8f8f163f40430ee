"""Supervised updates, alone and beside rollouts, against transformers' own loss and the formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.models import tiny_qwen3
from support.rows import random_rows, row
from support.slow_logprobs import slow_logprobs
from unbroken.errors import InvalidInputError
from unbroken.training.config import TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.supervised import make_supervised_row
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample


@pytest.fixture
def supervised() -> list[TrainingSample]:
    """Five rows of different lengths, with gaps in their loss masks, in three passes."""
    return [make_supervised_row(each.token_ids, each.loss_mask) for each in random_rows(np.random.default_rng(2), 5)]


def trainer_of(**changes: Any) -> Trainer:
    return Trainer(tiny_qwen3(), TrainerConfig(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=25, **changes))


def gradient_of(loss: torch.Tensor, model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.double().clone() for name, each in model.named_parameters()}


def expect_moved(trainer: Trainer, expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(each.abs().max()) for each in expected.values())
    before = dict(tiny_qwen3().requires_grad_(False).named_parameters())
    for name, weight in trainer.named_weights():
        moved = before[name].double() - weight.detach().double()
        assert float((moved - expected[name]).abs().max()) / largest < 2e-4, name


def mean_nll(model: Any, rows: Sequence[TrainingSample]) -> torch.Tensor:
    return -torch.cat(slow_logprobs(model, rows)).mean()


def test_loss_and_gradient_are_those_of_transformers(supervised):
    model = tiny_qwen3()
    longest = max(len(each.token_ids) for each in supervised)
    ids, labels = torch.zeros(5, longest, dtype=torch.long), torch.full((5, longest), -100)
    attended = torch.zeros(5, longest, dtype=torch.long)
    for k, each in enumerate(supervised):
        given = torch.from_numpy(each.token_ids.astype(np.int64))
        ids[k, : len(given)], attended[k, : len(given)] = given, 1
        labels[k, : len(given)] = torch.where(torch.from_numpy(each.loss_mask.copy()), given, -100)
    loss = model(input_ids=ids, attention_mask=attended, labels=labels).loss
    trainer = trainer_of()
    found = trainer.supervise(supervised)
    assert found["supervised/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["supervised/num_loss_tokens"] == int((labels != -100).sum())
    assert found["supervised/num_tokens"] == int(attended.sum())
    assert trainer.policy_version == found["train/policy_version"] == 1
    expect_moved(trainer, gradient_of(loss, model))


def test_the_gradient_is_that_of_float64(supervised):
    trainer, model = trainer_of(), tiny_qwen3().double()
    trainer.supervise(supervised)
    expect_moved(trainer, gradient_of(mean_nll(model, supervised), model))


def test_a_learning_rate_takes_the_place_of_the_optimizers(supervised):
    trainer, model = trainer_of(), tiny_qwen3()
    found = trainer.supervise(supervised, learning_rate=3e6)
    assert found["supervised/learning_rate"] == 3e6
    expect_moved(trainer, {name: 3 * each for name, each in gradient_of(mean_nll(model, supervised), model).items()})


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_beside_rollouts_the_weighted_mean_is_added_at_temperature_1(supervised, temperature):
    rollouts = [replace(each, temperature=temperature) for each in random_rows(np.random.default_rng(3), 4)]
    alone, both, model = trainer_of(), trainer_of(), tiny_qwen3()
    own = alone.step(rollouts)
    stats = both.step(rollouts, supervised=supervised, weight=0.3)
    loss = mean_nll(model, supervised)
    expected = gradient_of(0.3 * loss, model)
    before = dict(tiny_qwen3().requires_grad_(False).named_parameters())
    for name, weight in alone.named_weights():
        expected[name] += (before[name] - weight.detach()).double()
    expect_moved(both, expected)
    metrics = step_metrics(stats)
    assert metrics["supervised/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["supervised/num_rows"] == 5
    assert {**metrics, **step_metrics(own)}["train/loss"] == pytest.approx(metrics["train/loss"])
    assert stats.mismatch == own.mismatch  # what was sampled is compared, and nothing else


def test_each_update_of_a_step_has_its_part_of_the_rows(supervised):
    rollouts = random_rows(np.random.default_rng(3), 6)
    trainer = trainer_of(num_minibatches=2, num_iterations=2)
    stats = trainer.step(rollouts, supervised=supervised, weight=0.3)
    assert (stats.num_updates, stats.supervised.num_rows) == (4, 10)


def test_rows_are_spread_over_the_updates_that_are_made_when_there_are_fewer_units_than_minibatches(supervised):
    trainer = trainer_of(num_minibatches=4, num_iterations=2)
    stats = trainer.step(random_rows(np.random.default_rng(3), 2), supervised=supervised, weight=0.3)
    assert (stats.num_updates, stats.supervised.num_rows) == (4, 10)


def test_without_supervised_rows_a_step_is_as_it_was(supervised):
    rollouts = random_rows(np.random.default_rng(3), 4)
    trainer, other = trainer_of(), trainer_of()
    assert not any(name.startswith("supervised/") for name in step_metrics(trainer.step(rollouts)))
    other.step(rollouts, supervised=[])
    for (name, weight), (_, same) in zip(trainer.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(weight, same), name


def test_what_cannot_be_trained_is_refused():
    trainer = trainer_of()
    with pytest.raises(InvalidInputError, match="at least one row"):
        trainer.supervise([])
    with pytest.raises(InvalidInputError, match="vocabulary ends at 63"):
        trainer.supervise([row([1, 99], sampled=[1])])
    assert trainer.policy_version == 0
