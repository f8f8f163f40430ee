"""Estimates of the distance to a reference, against their formulas in plain floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from unbroken.training.loss_config import KlEstimator
from unbroken.training.objective.losses import kl_penalty

POLICY, REFERENCE = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


def formula(estimator: KlEstimator, logprob: float, reference: float, old: float) -> tuple[float, float]:
    """The value and its derivative by the logprob."""
    d = logprob - reference
    k3 = math.exp(-d) - 1 + d
    ratio = math.exp(logprob - old)
    return {
        KlEstimator.K1: (d, 1.0),
        KlEstimator.K2: (d * d / 2, d),
        KlEstimator.K3: (k3, 1 - math.exp(-d)),
        KlEstimator.K3_RATIO_WEIGHTED: (ratio * k3, ratio * k3 + ratio * (1 - math.exp(-d))),
    }[estimator]


@pytest.mark.parametrize("estimator", KlEstimator)
@settings(max_examples=num_cases(30, in_fuzz=600), derandomize=True)
@given(tokens=st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-6, 0)), max_size=8))
def test_for_any_logprobs_value_and_gradient_are_those_of_the_formula(estimator, tokens):
    values = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3)
    logprobs = values[:, 0].clone().requires_grad_()
    penalty = kl_penalty(estimator, logprobs, values[:, 1], values[:, 2])
    penalty.sum().backward()
    for token, found, gradient in zip(tokens, penalty.tolist(), logprobs.grad.tolist(), strict=True):
        value, slope = formula(estimator, *token)
        assert found == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert gradient == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_k1_and_k3_average_to_the_divergence(estimator):
    policy, reference = torch.from_numpy(POLICY).log(), torch.from_numpy(REFERENCE).log()
    mean = float((torch.from_numpy(POLICY) * kl_penalty(estimator, policy, reference, policy)).sum())
    assert mean == pytest.approx(float((POLICY * np.log(POLICY / REFERENCE)).sum()))


@pytest.mark.parametrize(
    ("estimator", "is_right"),
    [(KlEstimator.K1, False), (KlEstimator.K2, True), (KlEstimator.K3, False), (KlEstimator.K3_RATIO_WEIGHTED, True)],
)
def test_in_the_loss_k2_and_the_ratio_weighted_k3_have_the_gradient_of_the_divergence(estimator, is_right):
    """Over all ids, each as often as the policy samples it; k1 has no gradient at all, k3 that of another distance."""

    def divergence(logits: np.ndarray) -> float:
        policy = np.exp(logits) / np.exp(logits).sum()
        return float((policy * np.log(policy / REFERENCE)).sum())

    at = np.log(POLICY)
    expected = [(divergence(at + 1e-6 * np.eye(3)[k]) - divergence(at - 1e-6 * np.eye(3)[k])) / 2e-6 for k in range(3)]
    logits = torch.from_numpy(at).requires_grad_()
    logprobs = logits.log_softmax(0)
    penalty = kl_penalty(estimator, logprobs, torch.from_numpy(REFERENCE).log(), logprobs.detach())
    (torch.from_numpy(POLICY) * penalty).sum().backward()
    found = logits.grad.numpy()
    assert np.allclose(found, expected, atol=1e-8) == is_right
    assert np.allclose(found, 0, atol=1e-12) == (estimator is KlEstimator.K1)
