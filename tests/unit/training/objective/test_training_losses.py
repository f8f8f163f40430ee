"""The clipped policy loss: numbers worked out by hand, its gradient, its statistics."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from unbroken.errors import InvalidInputError
from unbroken.training.config import TrainerConfig
from unbroken.training.loss_config import ClipConfig
from unbroken.training.model.batch import idle_batch
from unbroken.training.model.logprobs import TokenScores
from unbroken.training.objective.base import BatchLoss, LossStats
from unbroken.training.objective.losses import k3
from unbroken.training.objective.policy_gradient import PolicyGradient

CLIP = ClipConfig(low=0.2, high=0.28)


def clipped_policy_loss(logprobs_N, old_N, advantages_N, *, weights_N, clip) -> BatchLoss:
    batch = replace(
        idle_batch(torch.device("cpu")),
        rollout_logprobs_N=old_N,
        old_logprobs_N=old_N,
        advantages_N=advantages_N,
        weights_N=weights_N,
        num_row_tokens=(len(old_N),),
    )
    return PolicyGradient().batch_loss(TokenScores(logprobs_N, None), batch, TrainerConfig(clip=clip))


def loss_of(ratios, advantages, *, num_loss_tokens=None, clip=CLIP):
    """The loss for tokens with these ratios, and the gradient with respect to each logprob."""
    old = torch.full((len(ratios),), -1.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    count = len(ratios) if num_loss_tokens is None else num_loss_tokens
    weights = torch.full((len(ratios),), 1 / count) if len(ratios) else torch.zeros(0)
    result = clipped_policy_loss(logprobs, old, torch.tensor(advantages), weights_N=weights, clip=clip)
    result.loss.backward()
    return BatchLoss(result.loss.detach(), result.stats), logprobs.grad


def test_golden_clipped_loss():
    """Six tokens: ratio, advantage -> term that min() picks.

    1.0,  2 -> 2           1.5,  2 -> clipped to 1.28: 2.56     0.5,  2 -> 1 (too low, still pulls up)
    1.0, -1 -> -1          1.5, -1 -> -1.5 (still pushes down)  0.5, -1 -> clipped to 0.8: -0.8
    Sum 2 + 2.56 + 1 - 1 - 1.5 - 0.8 = 2.26.
    """
    result, grad = loss_of([1.0, 1.5, 0.5, 1.0, 1.5, 0.5], [2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
    assert float(result.loss) == pytest.approx(-2.26 / 6, rel=1e-6)
    np.testing.assert_allclose(grad, np.array([-2.0, 0.0, -1.0, 1.0, 1.5, 0.0]) / 6, rtol=1e-5)


def test_golden_statistics():
    result, _ = loss_of([1.0, 1.5, 0.5, 1.0, 1.5, 0.5], [2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
    k3 = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    assert result.stats.num_tokens == 6
    assert result.stats.clip_fraction == pytest.approx(2 / 6)
    assert result.stats.mean_ratio == pytest.approx(1.0, rel=1e-6)
    assert result.stats.k3 == pytest.approx(k3 / 6, rel=1e-5)
    assert result.stats.loss_sum == pytest.approx(float(result.loss), rel=1e-6)


def test_the_two_clips_are_not_mixed_up():
    assert float(loss_of([1.27], [1.0])[0].loss) == pytest.approx(-1.27)
    assert float(loss_of([1.29], [1.0])[0].loss) == pytest.approx(-1.28)
    assert float(loss_of([0.81], [-1.0])[0].loss) == pytest.approx(0.81)
    assert float(loss_of([0.75], [-1.0])[0].loss) == pytest.approx(0.8)


def test_at_equal_policies_the_gradient_is_that_of_the_policy_gradient():
    _, grad = loss_of([1.0, 1.0], [3.0, -2.0])
    np.testing.assert_allclose(grad, [-1.5, 1.0])


tokens = st.lists(st.tuples(st.floats(0.05, 20), st.floats(-5, 5)), min_size=1, max_size=12)


@settings(max_examples=num_cases(60, in_fuzz=1500), derandomize=True)
@given(tokens, st.integers(0, 12))
def test_for_any_split_the_parts_add_up_to_the_whole(values, cut):
    """The token mean is over the update's tokens, so micro batches simply add: no mean of means."""
    ratios, advantages = (list(column) for column in zip(*values, strict=True))
    num = len(values)
    whole, grad = loss_of(ratios, advantages)
    parts = [loss_of(ratios[a:b], advantages[a:b], num_loss_tokens=num) for a, b in ((0, cut), (cut, num))]
    assert float(parts[0][0].loss + parts[1][0].loss) == pytest.approx(float(whole.loss), rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(torch.cat([parts[0][1], parts[1][1]]), grad, rtol=1e-5, atol=1e-7)
    added = parts[0][0].stats + parts[1][0].stats
    assert added.num_tokens == num
    assert added.loss_sum == pytest.approx(whole.stats.loss_sum, rel=1e-4, abs=1e-5)
    assert added.num_clipped == whole.stats.num_clipped
    assert added.k3 == pytest.approx(whole.stats.k3, rel=1e-4, abs=1e-6)


@settings(max_examples=num_cases(60, in_fuzz=1500), derandomize=True)
@given(tokens)
def test_for_any_tokens_the_loss_is_never_better_than_unclipped_and_k3_never_negative(values):
    ratios, advantages = (list(column) for column in zip(*values, strict=True))
    result, _ = loss_of(ratios, advantages)
    unclipped = -float(np.mean(np.multiply(ratios, advantages)))
    assert float(result.loss) >= unclipped - 1e-4 * max(1, abs(unclipped))
    assert result.stats.k3 >= 0


def test_no_tokens_give_a_zero_that_can_be_differentiated():
    logprobs = torch.zeros(0, requires_grad=True)
    result = clipped_policy_loss(logprobs, torch.zeros(0), torch.zeros(0), weights_N=torch.zeros(0), clip=CLIP)
    result.loss.backward()
    assert float(result.loss.detach()) == 0
    assert result.stats == LossStats()


def test_shapes_that_differ_are_refused():
    with pytest.raises(InvalidInputError, match=r"share one shape \[N\], got \[\(3,\), \(3,\), \(2,\), \(3,\)\]"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), weights_N=torch.ones(3), clip=CLIP)


def test_a_weight_multiplies_its_own_tokens_loss_and_gradient():
    logprobs = torch.zeros(3, requires_grad=True)
    result = clipped_policy_loss(
        logprobs, torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]), weights_N=torch.tensor([0.5, 0.0, 0.25]), clip=CLIP
    )
    result.loss.backward()
    assert float(result.loss.detach()) == -1.5
    assert logprobs.grad.tolist() == [-0.5, 0.0, -1.0]


def test_k3_of_the_worked_example():
    penalty = k3(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
    assert float(penalty[0]) == pytest.approx(0.5 + math.log(2) - 1, rel=1e-6)


@settings(max_examples=num_cases(80), derandomize=True)
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), max_size=12))
def test_for_any_logprobs_k3_and_its_gradient_are_those_of_a_loop_in_float64(pairs):
    """The gradient of exp(r - l) - (r - l) - 1 with respect to l is 1 - exp(r - l)."""
    values = torch.tensor(pairs).reshape(-1, 2)
    logprobs = values[:, 0].clone().requires_grad_()
    penalty = k3(logprobs, values[:, 1])
    penalty.sum().backward()
    for (policy, reference), found, grad in zip(values.tolist(), penalty.tolist(), logprobs.grad.tolist(), strict=True):
        ratio = math.exp(reference - policy)
        assert found == pytest.approx(ratio - (reference - policy) - 1, rel=1e-5, abs=1e-6)
        assert grad == pytest.approx(1 - ratio, rel=1e-5, abs=1e-6)
        assert found >= 0


def test_k3_averages_to_the_divergence_of_policy_and_reference():
    """Over all ids, each as often as the policy samples it, the mean is KL(policy || reference)."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    mean = (policy * k3(policy.log(), reference.log())).sum()
    assert float(mean) == pytest.approx(float((policy * (policy / reference).log()).sum()), rel=1e-5)


def test_a_reference_of_another_shape_is_refused():
    with pytest.raises(InvalidInputError, match=r"got \(1,\), \(2,\)"):
        k3(torch.zeros(2), torch.zeros(1))
