"""Whole updates by every algorithm, distance and bonus, against the papers' formulas over trajectories in float64.

Trajectories forked into several rows, which lie in different forward passes. The references compute logprobs a row at a
time from the model's own logits, and let autograd differentiate the formula as the paper has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT
from support.models import tiny_qwen3
from support.rows import random_rows
from support.slow_logprobs import slow_entropies, slow_logprobs
from unbroken.errors import InvalidInputError
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.loss_config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    KlConfig,
    KlEstimator,
    KlPlace,
    LossNormalization,
)
from unbroken.training.objective.comparison import Processes
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.policy_gradient import ALGORITHMS, PolicyGradient
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

CLIPS = {
    "gspo": ClipConfig(low=0.05, high=0.1),
    "gspo_token": ClipConfig(low=0.05, high=0.1, dual=1.4),
    "cispo": ClipConfig(high=0.5),
    "sapo": ClipConfig(positive_temperature=1.0, negative_temperature=2.0),
}
DEFAULT_CLIP = ClipConfig(low=0.2, high=0.28, dual=2.0)
MOST = 60


@pytest.fixture(scope="module")
def units() -> list[TrajectoryRows]:
    """Four trajectories of 3, 1, 2 and 1 rows, each with one advantage, sampled some way from the model."""
    rng = np.random.default_rng(5)
    rows = random_rows(rng, 7)
    logprobs = Trainer(tiny_qwen3(), TrainerConfig()).logprobs(rows)
    units = []
    for part, advantage, reward in (
        (slice(0, 3), 1.5, 2.0),
        (slice(3, 4), -0.5, 0.0),
        (slice(4, 6), -1.0, 0.5),
        (slice(6, 7), 0.75, 1.0),
    ):
        members = [
            replace(
                row,
                rollout_logprobs=(values + rng.normal(0.05, 0.3, len(values))).astype(np.float32),
                advantages=np.where(row.loss_mask, advantage, 0),
            )
            for row, values in zip(rows[part], logprobs[part], strict=True)
        ]
        units.append(TrajectoryRows(rows=tuple(members), group="ab"[len(units) // 2], reward=reward))
    return units


def policy_terms(name: str, logprobs: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    """[tokens of one trajectory] the paper's losses."""
    clip, ratio = CLIPS.get(name, DEFAULT_CLIP), (logprobs - old).exp()
    if name == "cispo":
        return -ratio.detach().clamp(0, 1 + clip.high) * advantage * logprobs
    if name == "sapo":
        hot = clip.positive_temperature if advantage > 0 else clip.negative_temperature
        return -torch.sigmoid(hot * (ratio - 1)) * 4 / hot * advantage
    if name in ("gspo", "gspo_token"):
        ratio = (logprobs - old).mean().exp().expand_as(ratio)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    if clip.dual is not None and advantage < 0:
        gain = gain.clamp(min=clip.dual * advantage)
    return -gain


def distance(estimator: KlEstimator, logprobs: torch.Tensor, reference: torch.Tensor, old: torch.Tensor) -> Any:
    d = logprobs - reference
    k3 = (-d).exp() - 1 + d
    return {
        KlEstimator.K1: d,
        KlEstimator.K2: d * d / 2,
        KlEstimator.K3: k3,
        KlEstimator.K3_RATIO_WEIGHTED: (logprobs - old).exp() * k3,
    }[estimator]


def divisor(config: TrainerConfig, normalization: LossNormalization, lengths: Sequence[int], k: int) -> float:
    return {
        LossNormalization.TOKEN: sum(lengths),
        LossNormalization.SEQUENCE: len(lengths) * lengths[k],
        LossNormalization.CONSTANT: len(lengths) * MOST,
    }[config.normalization or normalization]


def rows_of(units: Sequence[TrajectoryRows]) -> list[TrainingSample]:
    return [row for unit in units for row in unit.rows]


def by_unit(units: Sequence[TrajectoryRows], of_rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = iter(of_rows)
    return [torch.cat([next(parts) for _ in unit.rows]) for unit in units]


def slow_loss(
    model: Any, units: Sequence[TrajectoryRows], name: str, config: TrainerConfig, reference: Any, advantages: Any
) -> torch.Tensor:
    logprobs = by_unit(units, slow_logprobs(model, rows_of(units)))
    entropies = by_unit(units, slow_entropies(model, rows_of(units)))
    sampled = by_unit(units, [torch.from_numpy(row.rollout_logprobs[row.loss_mask]).double() for row in rows_of(units)])
    is_own = ALGORITHMS[name].get_old_logprobs(config) is OldLogprobs.RECOMPUTE
    old = [values.detach() for values in logprobs] if is_own else sampled
    total = torch.zeros((), dtype=torch.float64)
    lengths = [len(values) for values in logprobs]
    frozen = None if reference is None else by_unit(units, slow_logprobs(reference, rows_of(units)))
    for k, advantage in enumerate(advantages):
        terms = policy_terms(name, logprobs[k], old[k], advantage)
        if config.chosen_correction.kind is CorrectionKind.SEQUENCE_MASK:
            product = (old[k] - sampled[k]).sum().exp()
            terms = terms * (product if 0.5 <= product <= 2 else 0)
        if frozen is not None and config.kl.place is KlPlace.LOSS:
            pull = distance(config.kl.estimator, logprobs[k], frozen[k].detach(), old[k])
            terms = terms + config.kl_weight * pull
        terms = terms - config.entropy_weight * entropies[k]
        total = total + terms.sum() / divisor(config, ALGORITHMS[name].normalization, lengths, k)
    return total


def expect_same_update(
    units: Sequence[TrajectoryRows],
    name: str,
    *,
    reference: Any = None,
    advantages: Sequence[float] = (1.5, -0.5, -1.0, 0.75),
    objective: PolicyGradient | None = None,
    **changes: Any,
) -> Any:
    config = TrainerConfig(
        optimizer=SUBTRACT_GRADIENT,
        tokens_per_micro_batch=30,
        clip=CLIPS.get(name, DEFAULT_CLIP),
        max_trajectory_tokens=MOST if name == "dr_grpo" else None,
        **changes,
    )
    slow, model = tiny_qwen3(), tiny_qwen3()
    expected = slow_loss(slow, units, name, config, reference, advantages)
    expected.backward()
    before = {key: parameter.detach().double().clone() for key, parameter in model.named_parameters()}
    trainer = Trainer(model, config, objective=objective or ALGORITHMS[name], reference=reference)
    stats = trainer.step(units)
    assert stats.loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
    largest = max(float(parameter.grad.abs().max()) for parameter in slow.parameters())
    gradients = {key: parameter.grad for key, parameter in slow.named_parameters()}
    for key, weight in trainer.named_weights():
        moved = before[key] - weight.double()
        assert float((moved - gradients[key]).abs().max()) / largest < 2e-4, key
    return stats


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "distillation"])  # of a teacher alone
def test_an_update_is_that_of_the_papers_formula_over_trajectories(units, name):
    expect_same_update(units, name, old_logprobs=OldLogprobs.SAMPLER)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_the_distance_in_the_loss_is_that_of_its_formula(units, estimator):
    reference = tiny_qwen3(seed=1)
    expect_same_update(units, "grpo", reference=reference, kl_weight=0.4, kl=KlConfig(estimator=estimator))


def test_the_entropy_bonus_is_that_of_its_formula(units):
    expect_same_update(units, "gspo", old_logprobs=OldLogprobs.SAMPLER, entropy_weight=0.3)


def test_the_entropy_is_always_measured_over_all_loss_tokens(units):
    expected = torch.cat(slow_entropies(tiny_qwen3(), rows_of(units)))
    for changes in ({}, {"entropy_weight": 0.1}):
        stats = Trainer(tiny_qwen3(), TrainerConfig(tokens_per_micro_batch=30, **changes)).step(units)
        assert stats.entropy == pytest.approx(float(expected.detach().mean()), rel=1e-5)


def test_a_correction_by_whole_trajectories_has_one_product_for_all_rows_of_one(units):
    kind = Correction(kind=CorrectionKind.SEQUENCE_MASK, low=0.5, high=2.0)
    stats = expect_same_update(units, "grpo", correction=kind, old_logprobs=OldLogprobs.RECOMPUTE)
    assert 0 < stats.corrected_fraction < 1


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K2, KlEstimator.K3])
def test_the_distance_in_the_reward_changes_the_advantages(units, estimator):
    """Rewards minus weight times the sum over the trajectory, then the mean of the group is subtracted."""
    reference = tiny_qwen3(seed=1)
    sampled = by_unit(units, [torch.from_numpy(row.rollout_logprobs[row.loss_mask]).double() for row in rows_of(units)])
    frozen = by_unit(units, slow_logprobs(reference, rows_of(units)))
    rewards = [
        unit.reward - 0.2 * float(distance(estimator, old, ref.detach(), old).sum())
        for unit, old, ref in zip(units, sampled, frozen, strict=True)
    ]
    advantages = [reward - np.mean(rewards[k // 2 * 2 : k // 2 * 2 + 2]) for k, reward in enumerate(rewards)]
    objective = replace(ALGORITHMS["dr_grpo"], normalization=LossNormalization.TOKEN)
    config = {"kl_weight": 0.2, "kl": KlConfig(estimator=estimator, place=KlPlace.REWARD)}
    stats = expect_same_update(units, "grpo", reference=reference, advantages=advantages, objective=objective, **config)
    assert stats.reference_k3 is not None


def test_the_distance_in_the_reward_needs_a_reward(units):
    config = TrainerConfig(kl_weight=0.2, kl=KlConfig(place=KlPlace.REWARD))
    trainer = Trainer(tiny_qwen3(), config, reference=tiny_qwen3(seed=1))
    for without in (replace(units[1], reward=None), units[1].rows[0]):
        with pytest.raises(InvalidInputError, match=r"units\[1\] must be TrajectoryRows with a reward with .*reward"):
            trainer.step([units[0], without])


def test_a_trajectory_without_siblings_keeps_its_advantage(units):
    """Its siblings sampled nothing, so they gave no rows."""
    config = TrainerConfig(kl_weight=0.2, kl=KlConfig(place=KlPlace.REWARD))
    trainer = Trainer(tiny_qwen3(), config, objective=ALGORITHMS["rloo"], reference=tiny_qwen3(seed=1))
    scored = [trainer._score_before_updates(unit.rows) for unit in units[:3]]
    changed = ALGORITHMS["rloo"].change_units(units[:3], scored, config)
    kept = [[new is old for new, old in zip(*each, strict=True)] for each in zip(changed, scored, strict=True)]
    assert kept == [[False] * 3, [False], [True] * 2]


def test_the_distance_in_the_reward_is_compared_over_all_processes(units):
    """Advantages over a step wait for the other processes' rewards, which here are [5, 7]."""
    config = TrainerConfig(kl_weight=1e-9, kl=KlConfig(place=KlPlace.REWARD))
    objective = ALGORITHMS["reinforce_plus_plus"]
    seen = []

    def gather(value: Any) -> list[Any]:
        seen.append(value)
        return [([np.array([5.0, 7.0])], None), value]

    trainer = Trainer(tiny_qwen3(), TrainerConfig())
    scored = [
        [replace(row, reference_logprobs=row.old_logprobs) for row in trainer._score_before_updates(unit.rows)]
        for unit in units[:2]
    ]
    mine = [replace(unit, reward=reward) for unit, reward in zip(units[:2], (3.0, 1.0), strict=True)]
    changed = objective.change_units(mine, scored, config, Processes(1, gather))
    for rows, reward in zip(changed, (3, 1), strict=True):
        expected = (reward - 4) / np.std([5, 7, 3, 1])
        for row in rows:
            np.testing.assert_allclose(row.sample.advantages[row.sample.loss_mask], expected, rtol=1e-6)
    assert len(seen) == 1


def test_one_more_forward_pass_is_made_only_if_trajectories_forked(units, monkeypatch):
    whole = [TrajectoryRows(rows=unit.rows[:1]) for unit in units]
    for given, name, expected in ((units, "gspo", 1), (whole, "gspo", 0), (units, "grpo", 0)):
        config = TrainerConfig(old_logprobs=OldLogprobs.SAMPLER)
        trainer = Trainer(tiny_qwen3(), config, objective=ALGORITHMS[name])
        calls = []
        score = trainer.backend.logprobs
        monkeypatch.setattr(trainer.backend, "logprobs", lambda rows, s=score, c=calls: c.append(rows) or s(rows))
        trainer.step(given)
        assert len(calls) == expected


def test_a_plain_function_of_the_users_is_a_loss(units):
    def reinforce(logprobs_N, batch, clip):
        return LOSSES["cispo"].function(logprobs_N, batch, ClipConfig(high=1e9))

    stats = Trainer(tiny_qwen3(), TrainerConfig(), objective=PolicyGradient(loss=reinforce)).step(units)
    assert stats.clip_fraction == 0
