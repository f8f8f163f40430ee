"""The trainer: equal gradients however rows are split and padded, checks at its door, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from support.gradients import SUBTRACT_GRADIENT, step_gradient
from support.images import image_span
from support.models import tiny_qwen3
from support.rows import random_rows, row
from unbroken.errors import InvalidInputError, InvariantError, TrainingError
from unbroken.training.config import OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.training.metrics.mismatch import mismatch
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample


def make_trainer(*, policy_version: int = 0, **config) -> Trainer:
    return Trainer(tiny_qwen3(), TrainerConfig(**config), policy_version=policy_version)


def gradient_of(samples, *, rows_apart=False, **config) -> dict[str, torch.Tensor]:
    """The gradient of one step, read off the update that it made."""
    budget = 1 if rows_apart else 100_000
    trainer = make_trainer(optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=budget, **config)
    return step_gradient(trainer, samples)[1]


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative to the largest entry of any gradient."""
    largest = max(float(gradient.abs().max()) for gradient in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / largest


def with_true_logprobs(samples, trainer: Trainer) -> list[TrainingSample]:
    """The same rows as if this trainer's weights had sampled them."""
    return [replace(s, rollout_logprobs=lp) for s, lp in zip(samples, trainer.logprobs(samples), strict=True)]


@pytest.fixture
def rows() -> list[TrainingSample]:
    return random_rows(np.random.default_rng(0), 6)


def test_one_row_at_a_time_gives_the_gradient_of_all_rows_at_once(rows):
    assert largest_difference(gradient_of(rows), gradient_of(rows, rows_apart=True)) < 1e-5


def test_the_gradient_is_the_mean_over_tokens_and_not_over_rows(rows):
    """A long and a short row: each token weighs 1 / N, whichever row it is in."""
    together = gradient_of(rows)
    num_tokens = [int(r.loss_mask.sum()) for r in rows]
    alone = [gradient_of([r]) for r in rows]
    weighed = {
        name: sum(n * grad[name] for n, grad in zip(num_tokens, alone, strict=True)) / sum(num_tokens)
        for name in together
    }
    assert largest_difference(together, weighed) < 1e-5


def test_padding_changes_neither_logprobs_nor_gradients(rows):
    short = row([1, 2, 3], sampled=[1, 2])
    long = row(list(range(40)), sampled=range(1, 40), advantage=0.0)
    trainer = make_trainer()
    alone, padded = trainer.logprobs([short])[0], trainer.logprobs([short, long])[0]
    np.testing.assert_allclose(padded, alone, atol=2e-6)
    whole = gradient_of([short, long])
    apart = gradient_of([short, long], rows_apart=True)
    assert largest_difference(whole, apart) < 1e-5


def test_the_id_used_for_padding_changes_nothing(rows, monkeypatch):
    with_zero = make_trainer().logprobs(rows)
    monkeypatch.setattr("unbroken.training.model.lanes.PADDING_ID", 63)
    with_other = make_trainer().logprobs(rows)
    for a, b in zip(with_zero, with_other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_id_after_the_last_trained_one_changes_nothing_and_one_before_it_does():
    base = gradient_of([row([1, 2, 3, 4, 5], sampled=[2, 3])])
    after = gradient_of([row([1, 2, 3, 4, 6], sampled=[2, 3])])
    before = gradient_of([row([1, 7, 3, 4, 5], sampled=[2, 3])])
    assert largest_difference(base, after) == 0
    assert largest_difference(base, before) > 0.01


def test_logprobs_are_those_of_the_model_at_the_rows_temperature():
    sample = row([1, 2, 3, 4], sampled=[2, 3], temperature=0.5)
    found = make_trainer().logprobs([sample])[0]
    with torch.no_grad():
        logits = tiny_qwen3()(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0]
    expected = (logits / 0.5).log_softmax(-1)
    np.testing.assert_allclose(found[2:], [expected[1, 3], expected[2, 4]], atol=1e-5)
    assert np.isnan(found[:2]).all()


def test_scores_have_the_entropy_and_the_rank_of_each_sampled_id(rows):
    sample = row([1, 2, 3, 4], sampled=[2, 3], temperature=0.5)
    trainer = make_trainer()
    (found,) = trainer.score([sample])
    with torch.no_grad():
        logprobs = (tiny_qwen3()(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0] / 0.5).log_softmax(-1)[1:3]
    np.testing.assert_allclose(found.logprobs, trainer.logprobs([sample])[0], atol=2e-6)
    np.testing.assert_allclose(found.entropies[2:], -(logprobs.exp() * logprobs).sum(-1), atol=1e-5)
    order = logprobs.argsort(-1, descending=True).tolist()
    assert found.ranks.tolist() == [0, 0, 1 + order[0].index(3), 1 + order[1].index(4)]
    assert np.isnan(found.entropies[:2]).all()
    for one, alone in zip(trainer.score(rows), (trainer.score([each])[0] for each in rows), strict=True):
        np.testing.assert_allclose(one.ranks, alone.ranks, atol=1)  # two ids may be as likely but for rounding


def test_what_the_loss_clips_and_corrects_is_known_of_each_id():
    """Ratios e**0, e**1, e**-1 and e**1 at a positive advantage: the clip holds two, the correction masks one."""
    sample = row([1, 2, 3, 4, 5], sampled=[1, 2, 3, 4], advantage=1.0)
    logprobs = sample.rollout_logprobs + np.float32([np.nan, 0, 1, -1, 1])
    (found,) = make_trainer().find_left_out([[sample]], [logprobs])
    assert found.clipped.tolist() == [False, False, True, False, True]
    assert not found.corrected.any()
    masks = Correction(kind=CorrectionKind.TOKEN_MASK, low=0.5, high=10.0)
    trainer = make_trainer(old_logprobs=OldLogprobs.RECOMPUTE, correction=masks)
    (found,) = trainer.find_left_out([[sample]], [logprobs])
    assert found.corrected.tolist() == [False, False, False, True, False]
    assert not found.clipped.any()


def test_what_a_joint_ratio_clips_is_of_all_rows_of_the_trajectory():
    """The mean log ratio of both rows is 0, though that of each is far outside of GSPO's clip."""
    first, second = row([1, 2, 3], sampled=[1, 2]), row([1, 4, 5], sampled=[1, 2])
    above, below = (sample.rollout_logprobs + np.float32(shift) for sample, shift in ((first, 0.5), (second, -0.5)))
    by_sampler = TrainerConfig(old_logprobs=OldLogprobs.SAMPLER)
    trainer = Trainer(tiny_qwen3(), by_sampler, objective=PolicyGradient(loss=LOSSES["gspo"]))
    both = trainer.find_left_out([[first, second]], [above, below])
    alone, beside = trainer.find_left_out([[first], [second]], [above, below])
    assert [found.clipped.tolist() for found in both] == [[False] * 3] * 2
    assert [found.clipped.tolist() for found in (alone, beside)] == [[False, True, True], [False] * 3]


def test_logprobs_come_back_in_the_order_of_the_rows(rows):
    trainer = make_trainer(tokens_per_micro_batch=20)
    for sample, logprobs in zip(rows, trainer.logprobs(rows), strict=True):
        np.testing.assert_allclose(logprobs, trainer.logprobs([sample])[0], atol=2e-6)
        np.testing.assert_array_equal(np.isfinite(logprobs), sample.sampled_mask)


def test_a_step_at_the_samplers_own_weights_starts_at_ratio_one(rows):
    trainer = make_trainer()
    stats = trainer.step(with_true_logprobs(rows, trainer))
    assert stats.mean_ratio == pytest.approx(1, abs=1e-5)
    assert stats.clip_fraction == 0
    assert stats.mismatch.max_abs < 1e-5
    assert stats.mismatch.share_off_20pct == 0


def test_i2_one_changed_id_shows_in_the_mismatch(rows):
    """What the mismatch is for: logprobs that belong to other ids than those trained on."""
    trainer = make_trainer()
    changed = with_true_logprobs(rows, trainer)
    ids = changed[0].token_ids.copy()
    position = int(np.flatnonzero(changed[0].sampled_mask)[0])
    ids[position] = (ids[position] + 1) % 64
    changed[0] = replace(changed[0], token_ids=ids)
    assert trainer.step(changed).mismatch.max_abs > 0.01


def test_recompute_takes_the_ratio_to_the_trainers_own_logprobs(rows):
    """The rows claim other logprobs, so against the sampler ratios are off and against the trainer they are one."""
    assert make_trainer().step(rows).mean_ratio != pytest.approx(1, abs=0.1)
    stats = make_trainer(old_logprobs=OldLogprobs.RECOMPUTE).step(rows)
    assert stats.mean_ratio == pytest.approx(1, abs=1e-5)
    assert stats.mismatch.max_abs > 0.1


def test_the_mismatch_is_taken_before_any_update_and_on_the_first_minibatch(rows):
    trainer = make_trainer(num_minibatches=3, optimizer=OptimizerConfig(learning_rate=0.1))
    stats = trainer.step(with_true_logprobs(rows, trainer))
    assert stats.num_updates == 3
    assert stats.mismatch.max_abs < 1e-5
    assert 0 < stats.mismatch.num_tokens < stats.num_loss_tokens
    assert stats.k3 > 1e-3


def test_each_row_is_trained_once_however_many_minibatches(rows):
    for num_minibatches in (1, 2, 4, 6):
        stats = make_trainer(num_minibatches=num_minibatches).step(rows)
        assert stats.num_updates == num_minibatches
        assert stats.num_loss_tokens == sum(r.loss_mask.sum() for r in rows)


def test_fewer_rows_than_minibatches_make_fewer_updates(rows):
    assert make_trainer(num_minibatches=4).step(rows[:2]).num_updates == 2


def test_statistics_count_rows_and_tokens(rows):
    stats = make_trainer(policy_version=7).step(rows)
    assert stats.policy_version == 8
    assert stats.num_rows == 6
    assert stats.num_tokens == sum(len(r.token_ids) for r in rows)
    assert stats.seconds > 0
    assert stats.grad_norm > 0


def test_the_same_seed_and_rows_give_the_same_weights(rows):
    trainers = [make_trainer(num_minibatches=2, seed=3) for _ in range(2)]
    for trainer in trainers:
        trainer.step(rows)
    for (_, a), (_, b) in zip(trainers[0].named_weights(), trainers[1].named_weights(), strict=True):
        assert torch.equal(a, b)


def test_gradients_are_clipped_to_the_norm_asked_for(rows):
    trainer = make_trainer(optimizer=replace(SUBTRACT_GRADIENT, max_grad_norm=0.125))
    before = {name: weight.double() for name, weight in trainer.named_weights()}
    stats = trainer.step(rows)
    moved = math.sqrt(sum(float((weight.double() - before[n]).square().sum()) for n, weight in trainer.named_weights()))
    assert stats.grad_norm > 0.125
    assert moved == pytest.approx(0.125, rel=1e-4)


def test_a_gradient_is_used_once():
    trainer = make_trainer(optimizer=OptimizerConfig(learning_rate=1e-3, betas=(0.0, 0.0)))
    trainer.step([row([1, 2], sampled=[1])])
    before = {name: weight.clone() for name, weight in trainer.named_weights()}
    trainer.step([row([1, 2], sampled=[1], advantage=0.0)])
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.named_weights())


def test_the_learning_rate_warms_up_over_updates(rows):
    trainer = make_trainer(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_updates=4), num_minibatches=2)
    assert trainer.step(rows).learning_rate == pytest.approx(0.5e-3)
    assert trainer.step(rows).learning_rate == pytest.approx(1e-3)
    assert trainer.step(rows).learning_rate == pytest.approx(1e-3)


def test_i6_staleness_counts_the_versions_since_sampling():
    rows = [row([1, 2, 3], sampled=[1, 2], version=2), row([1, 2, 3, 4], sampled=[2, 3], version=5)]
    stats = make_trainer(policy_version=5).step(rows)
    assert stats.staleness_max == 3
    assert stats.staleness_mean == 1.5


def test_i6_a_row_from_newer_weights_is_refused():
    trainer = make_trainer(policy_version=2)
    with pytest.raises(InvariantError, match=r"samples\[0\] has ids sampled by policy version 3, .* version 2"):
        trainer.step([row([1, 2], sampled=[1], version=3)])
    assert trainer.policy_version == 2


def test_i2_a_row_that_begins_with_a_sampled_id_is_refused():
    with pytest.raises(InvariantError, match=r"samples\[0\] begins with a sampled id"):
        make_trainer().step([row([1, 2], sampled=[0, 1])])


@pytest.mark.parametrize(
    ("changes", "broken_rule"),
    [
        ({"rollout_logprobs": np.array([np.nan, np.nan, -1.0])}, "exactly the sampled ids have a finite logprob"),
        ({"rollout_logprobs": np.array([0.0, -1.0, -1.0])}, "exactly the sampled ids have a finite logprob"),
        ({"rollout_logprobs": np.array([-1.0, -1.0])}, r"rollout_logprobs has shape \(2,\) for 3 token_ids"),
        ({"loss_mask": np.array([True, True, True])}, "the loss covers sampled ids only"),
        ({"policy_versions": np.array([-1, 0, -1])}, "exactly the sampled ids have a version"),
        ({"advantages": np.array([1.0, 1.0, 1.0])}, "advantages are zero outside the loss mask"),
        ({"advantages": np.array([0.0, np.nan, 1.0])}, "advantages are finite"),
    ],
)
def test_i2_a_row_whose_parts_disagree_never_reaches_the_trainer(changes, broken_rule):
    with pytest.raises(InvariantError, match=broken_rule):
        make_trainer().step([replace(row([1, 2, 3], sampled=[1, 2]), **changes)])


def test_rows_of_two_temperatures_are_refused():
    rows = [row([1, 2], sampled=[1]), row([1, 2], sampled=[1], temperature=0.7)]
    with pytest.raises(
        InvalidInputError, match=r"samples\[1\] was sampled at temperature 0\.7 and samples\[0\] at 1\.0"
    ):
        make_trainer().step(rows)


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidInputError, match=r"samples\[0\]\.token_ids contains 64, and .* ends at 63"):
        make_trainer().step([row([1, 64], sampled=[1])])


def test_a_row_with_nothing_to_train_is_refused_and_can_be_scored():
    nothing = np.zeros(2)
    scored_only = replace(row([1, 2], sampled=[1]), loss_mask=nothing, advantages=nothing)
    with pytest.raises(InvalidInputError, match=r"samples\[0\] has no id in its loss_mask"):
        make_trainer().step([scored_only])
    assert np.isfinite(make_trainer().logprobs([scored_only])[0][1])


@pytest.mark.parametrize("ids", [[], [1], [1, 2]])
def test_a_row_with_nothing_sampled_is_refused(ids):
    with pytest.raises(InvalidInputError, match=r"samples\[0\] has no sampled id"):
        make_trainer().logprobs([row(ids, sampled=[])])


def test_a_row_with_images_is_refused():
    sample = replace(row([1, 2], sampled=[1]), images=(image_span(offset=0, length=1, image="cat"),))
    with pytest.raises(InvalidInputError, match=r"samples\[0\] has 1 images: give the trainer"):
        make_trainer().step([sample])


def test_a_step_without_rows_is_refused():
    with pytest.raises(InvalidInputError, match="at least one row"):
        make_trainer().step([])


def test_an_update_that_is_not_finite_is_not_made():
    trainer = make_trainer()
    before = {name: weight.clone() for name, weight in trainer.named_weights()}
    with pytest.raises(TrainingError, match=r"the gradient's norm is (nan|inf) at update 0, which was not made"):
        trainer.step([row([1, 2], sampled=[1], logprob=-200.0, advantage=-1.0)])
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.named_weights())
    assert trainer.policy_version == 0
    trainer.step([row([1, 2], sampled=[1])])
    assert all(weight.isfinite().all() for _, weight in trainer.named_weights())


def test_weights_in_half_precision_are_refused():
    with pytest.raises(InvalidInputError, match=r"model\.embed_tokens\.weight is torch\.bfloat16, and .* float32"):
        Trainer(tiny_qwen3().bfloat16(), TrainerConfig())


def test_an_accelerator_that_accumulates_by_itself_is_refused():
    with pytest.raises(InvalidInputError, match="gradient_accumulation_steps must be 1, got 4"):
        Trainer(tiny_qwen3(), TrainerConfig(), accelerator=Accelerator(gradient_accumulation_steps=4))


def test_a_launchers_processes_that_accelerate_has_not_joined_are_refused(monkeypatch):
    """Each of them would train by itself, on all rows, and write the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        InvalidInputError, match="WORLD_SIZE is 2, and accelerate has 1 process: set ACCELERATE_USE_CPU=true"
    ):
        Trainer(tiny_qwen3(), TrainerConfig())
    monkeypatch.setenv("WORLD_SIZE", "1")
    Trainer(tiny_qwen3(), TrainerConfig())


def test_a_tied_weight_is_published_once_and_under_the_models_own_name():
    names = [name for name, _ in make_trainer().named_weights()]
    assert len(names) == len(set(names))
    assert names == [name for name, _ in tiny_qwen3().named_parameters()]
    assert "lm_head.weight" not in names


def test_a_bandit_on_one_token_is_learnt():
    """After the prompt [1, 2], id 9 is worth +1 and every other id -1/63: its probability goes from small to most."""
    trainer = make_trainer(optimizer=OptimizerConfig(learning_rate=3e-3))
    arms = [row([1, 2, arm], sampled=[2]) for arm in range(64)]
    rng = np.random.default_rng(0)
    probabilities = []
    for _ in range(12):
        logprobs = np.array([values[2] for values in trainer.logprobs(arms)])
        probabilities.append(float(np.exp(logprobs[9])))
        assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-4)
        drawn = np.append(rng.choice(64, 31, p=np.exp(logprobs) / np.exp(logprobs).sum()), 9)
        rewards = (drawn == 9).astype(float)
        if rewards.min() == rewards.max():
            break
        advantages = (rewards - rewards.mean()) / rewards.std()
        trainer.step(
            [
                row([1, 2, arm], sampled=[2], advantage=a, logprob=logprobs[arm], version=trainer.policy_version)
                for arm, a in zip(drawn.tolist(), advantages, strict=True)
            ]
        )
    assert probabilities[0] < 0.1
    assert probabilities[-1] > 0.8


def test_mismatch_of_trainer_logprobs_is_what_the_step_reports(rows):
    trainer = make_trainer()
    mask = np.concatenate([r.loss_mask for r in rows])
    scored, sampled = np.concatenate(trainer.logprobs(rows)), np.concatenate([r.rollout_logprobs for r in rows])
    expected = mismatch(scored[mask], sampled[mask])
    found = trainer.step(rows).mismatch
    assert found.num_tokens == expected.num_tokens
    assert found.k3 == pytest.approx(expected.k3, rel=1e-4)
    assert found.max_abs == pytest.approx(expected.max_abs, rel=1e-5)
