"""Each named policy loss and its gradient, against the papers' formulas in float64 numpy.

The references know nothing of tensors: gradients by hand, or by central differences of the formula with the parts that
it takes without gradient held fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import ClipConfig
from unbroken.training.model.batch import Batch, TrajectorySums, idle_batch
from unbroken.training.objective.losses import LOSSES, PolicyLoss, as_policy_loss, gspo, mean_log_ratio

Rows = Sequence[Sequence[tuple[float, float, float]]]
"""For each row its tokens: logprob, old logprob, advantage."""
STEP = 1e-6


def batch_of(rows: Rows, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, Batch]:
    flat = torch.tensor([token for row in rows for token in row], dtype=dtype).reshape(-1, 3)
    batch = replace(
        idle_batch(torch.device("cpu")),
        old_logprobs_N=flat[:, 1],
        rollout_logprobs_N=flat[:, 1],
        advantages_N=flat[:, 2],
        weights_N=torch.ones(len(flat), dtype=dtype),
        num_row_tokens=tuple(map(len, rows)),
    )
    return flat[:, 0].clone().requires_grad_(), batch


def ours(rows: Rows, loss: PolicyLoss, clip: ClipConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The losses, the gradient of their sum, and which tokens were clipped."""
    logprobs, batch = batch_of(rows)
    found = loss(logprobs, batch, clip)
    found.losses_N.sum().backward()
    assert logprobs.grad is not None
    return found.losses_N.detach().numpy(), logprobs.grad.numpy(), found.clipped_N.numpy()


def clip_gain(ratio: float, advantage: float, clip: ClipConfig) -> float:
    """PPO's min, with the dual clip's max for negative advantages."""
    gain = min(ratio * advantage, min(max(ratio, 1 - clip.low), 1 + clip.high) * advantage)
    return max(gain, clip.dual * advantage) if clip.dual is not None and advantage < 0 else gain


def sequence_ratio(row: Sequence[tuple[float, float, float]]) -> float:
    return float(np.exp(np.mean([logprob - old for logprob, old, _ in row])))


def clipped_formula(row, t, clip, fixed):
    logprob, old, advantage = row[t]
    return -clip_gain(np.exp(logprob - old), advantage, clip)


def gspo_token_formula(row, t, clip, fixed):
    """s' = sg(s) pi / sg(pi): `fixed` is the row at which nothing moves."""
    logprob, _, advantage = row[t]
    return -clip_gain(sequence_ratio(fixed) * np.exp(logprob - fixed[t][0]), advantage, clip)


def cispo_formula(row, t, clip, fixed):
    logprob, _, advantage = row[t]
    ratio = np.exp(fixed[t][0] - fixed[t][1])
    low = 0 if clip.low is None else 1 - clip.low
    return -min(max(ratio, low), 1 + clip.high) * advantage * logprob


def sapo_formula(row, t, clip, fixed):
    logprob, old, advantage = row[t]
    hot = clip.positive_temperature if advantage > 0 else clip.negative_temperature
    return -(1 / (1 + np.exp(-hot * (np.exp(logprob - old) - 1)))) * 4 / hot * advantage


FORMULAS: dict[str, Callable[..., float]] = {
    "clipped": clipped_formula,
    "gspo": gspo_token_formula,
    "gspo_token": gspo_token_formula,
    "cispo": cispo_formula,
    "sapo": sapo_formula,
}
CLIPS = {
    "clipped": [ClipConfig(low=0.2, high=0.28), ClipConfig(low=0.1, high=0.5, dual=2.0)],
    "gspo": [ClipConfig(low=0.05, high=0.1), ClipConfig(low=0.05, high=0.1, dual=1.3)],
    "gspo_token": [ClipConfig(low=0.05, high=0.1)],
    "cispo": [ClipConfig(high=1.5), ClipConfig(low=0.4, high=0.8)],
    "sapo": [ClipConfig(positive_temperature=1.0, negative_temperature=1.05)],
}

tokens = st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-3, 3))
rows_of_tokens = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=4)


def moved(row, t, by):
    return [(logprob + by * (k == t), old, advantage) for k, (logprob, old, advantage) in enumerate(row)]


@pytest.mark.parametrize(("name", "clip"), [(name, clip) for name, clips in CLIPS.items() for clip in clips])
@settings(max_examples=num_cases(30, in_fuzz=600), derandomize=True)
@given(rows=rows_of_tokens)
def test_for_any_rows_each_loss_and_its_gradient_are_those_of_the_papers_formula(name, clip, rows):
    losses, gradient, clipped = ours(rows, LOSSES[name], clip)
    formula, index = FORMULAS[name], 0
    for row in rows:
        for t in range(len(row)):
            expected = formula(row, t, clip, row)
            assert losses[index] == pytest.approx(expected, rel=1e-9, abs=1e-12)
            above, below = (formula(moved(row, t, by), t, clip, row) for by in (STEP, -STEP))
            one_sided = [(above - expected) / STEP, (expected - below) / STEP]
            if abs(one_sided[0] - one_sided[1]) < 1e-3 * max(1, abs(one_sided[0])):  # not at a corner
                assert gradient[index] == pytest.approx((above - below) / (2 * STEP), rel=1e-5, abs=1e-7)
            if name in ("clipped", "gspo", "gspo_token") and clipped[index]:
                assert gradient[index] == 0
            index += 1


@settings(max_examples=num_cases(30, in_fuzz=600), derandomize=True)
@given(rows=rows_of_tokens, advantages=st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_for_any_trajectories_gspo_is_the_papers_loss_over_sequences(rows, advantages):
    """Equation 5: -1/G sum_i min(s_i A_i, clip(s_i) A_i). Its gradient, by differences, with s_i moving as a whole."""
    clip = ClipConfig(low=0.05, high=0.1)
    rows = [[(logprob, old, advantages[i]) for logprob, old, _ in row] for i, row in enumerate(rows)]
    logprobs, batch = batch_of(rows)
    weights = torch.cat([torch.full((len(row),), 1 / (len(rows) * len(row)), dtype=torch.float64) for row in rows])
    total = (weights * LOSSES["gspo"](logprobs, batch, clip).losses_N).sum()
    total.backward()

    def paper(of_rows):
        return -np.mean([clip_gain(sequence_ratio(row), row[0][2], clip) for row in of_rows])

    assert float(total.detach()) == pytest.approx(paper(rows), rel=1e-9, abs=1e-12)
    index = 0
    for i, row in enumerate(rows):
        for t in range(len(row)):
            values = [paper([*rows[:i], moved(row, t, by), *rows[i + 1 :]]) for by in (-STEP, 0, STEP)]
            if abs(values[2] - 2 * values[1] + values[0]) < 1e-9:  # not at a corner
                assert float(logprobs.grad[index]) == pytest.approx((values[2] - values[0]) / 2e-6, rel=1e-4, abs=1e-7)
            index += 1


def test_golden_dual_clip():
    """Ratio 5, advantage -1: PPO lets it count 5; dual clip at 3 counts 3, without gradient. Positive ones stay."""
    rows = [[(np.log(5.0), 0.0, -1.0), (np.log(5.0), 0.0, 1.0), (np.log(2.0), 0.0, -1.0)]]
    losses, gradient, clipped = ours(rows, LOSSES["clipped"], ClipConfig(dual=3.0))
    np.testing.assert_allclose(losses, [3, -1.28, 2])
    np.testing.assert_allclose(gradient, [0, 0, 2], atol=1e-12)
    assert clipped.tolist() == [True, True, False]


def test_golden_cispo_keeps_the_gradient_of_a_clipped_token():
    """Ratio 10 is bounded to 5, and the gradient is -5 A; PPO would have none."""
    losses, gradient, clipped = ours([[(-1.0, -1 - np.log(10.0), 2.0)]], LOSSES["cispo"], ClipConfig())
    np.testing.assert_allclose((losses[0], gradient[0]), (10, -10))
    assert clipped.tolist() == [True]


def test_golden_sapo_at_equal_policies_has_the_gradient_of_the_policy_gradient():
    """sigmoid'(0) * 4 = 1, whatever the temperature: the gradient is -A. The value is 2 / t A."""
    losses, gradient, _ = ours([[(-1.0, -1.0, 3.0), (-1.0, -1.0, -2.0)]], LOSSES["sapo"], ClipConfig())
    np.testing.assert_allclose(losses, [-6, 4 / 1.05])
    np.testing.assert_allclose(gradient, [-3, 2])


def test_golden_gspo_has_one_ratio_for_a_row():
    """Ratios 2 and 1/2 have the mean 1; ratios 4 and 1 have 2, which is clipped at 1.0004 for a positive advantage."""
    rows = [[(np.log(2.0), 0.0, 1.0), (-np.log(2.0), 0.0, 1.0)], [(np.log(4.0), 0.0, 1.0), (0.0, 0.0, 1.0)]]
    losses, gradient, clipped = ours(rows, LOSSES["gspo"], ClipConfig())
    np.testing.assert_allclose(losses, [-1, -1, -1.0004, -1.0004])
    np.testing.assert_allclose(gradient, [-1, -1, 0, 0], atol=1e-12)
    assert clipped.tolist() == [False, False, True, True]


def test_a_trajectory_of_several_rows_has_one_ratio_over_all_of_them():
    """Two rows of one trajectory in two passes, log ratios 0.3 | 0.1 0.2: both have the mean 0.2."""
    whole = [[(0.3, 0.0, 1.0), (0.1, 0.0, 1.0), (0.2, 0.0, 1.0)]]
    expected, gradient, _ = ours(whole, LOSSES["gspo"], ClipConfig(high=0.5))
    sums = TrajectorySums(num_tokens=3, log_ratio=0.6, sampler_gap=0.0)
    found, gradients = [], []
    for part in ([whole[0][:1]], [whole[0][1:]]):
        logprobs, batch = batch_of(part)
        losses = LOSSES["gspo"](logprobs, replace(batch, trajectories=(sums,)), ClipConfig(high=0.5)).losses_N
        losses.sum().backward()
        found += losses.tolist()
        gradients += logprobs.grad.tolist()
    assert found == pytest.approx(expected.tolist())
    assert gradients == pytest.approx(gradient.tolist())


def test_a_loss_of_the_users_that_reads_whole_trajectories_must_say_so():
    logprobs, batch = batch_of([[(0.3, 0.0, 1.0)]])
    sums = TrajectorySums(num_tokens=3, log_ratio=None, sampler_gap=0.0)
    with pytest.raises(InvalidInputError, match=r"must be given as PolicyLoss\(\.\.\., is_joint=True\)"):
        mean_log_ratio(logprobs, replace(batch, trajectories=(sums,)))


def test_a_plain_function_has_the_clip_of_ppo():
    assert as_policy_loss(gspo).complete(ClipConfig(high=0.5)) == ClipConfig(low=0.2, high=0.5)
    assert LOSSES["gspo"].complete(ClipConfig()) == ClipConfig(low=3e-4, high=4e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_no_losses(name):
    logprobs, batch = batch_of([])
    found = LOSSES[name](logprobs, replace(batch, num_row_tokens=(0,)), ClipConfig())
    assert found.losses_N.shape == found.clipped_N.shape == (0,)
