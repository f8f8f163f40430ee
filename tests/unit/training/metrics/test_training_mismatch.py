"""Trainer against sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.rows import row
from unbroken.errors import InvalidInputError, InvariantError, PolicyMismatchError
from unbroken.training.metrics.mismatch import (
    Mismatch,
    check_one_policy,
    check_same_bits,
    k3_by_lag,
    mismatch,
    mismatch_of_rows,
)
from unbroken.types import TrainingSample


def test_golden_mismatch():
    """Ratios 1, 1.5 and 0.75: two of three are off by more than 20 %."""
    rollout = np.array([-1.0, -2.0, -3.0])
    result = mismatch(rollout + np.log([1, 1.5, 0.75]), rollout)
    assert result.num_tokens == 3
    assert result.k3 == pytest.approx((0.5 - math.log(1.5) - 0.25 - math.log(0.75)) / 3)
    assert result.max_abs == pytest.approx(math.log(1.5))
    assert result.share_off_20pct == pytest.approx(2 / 3)


def test_the_ratio_is_trainer_over_sampler():
    """A trainer that gives 1.21 times the sampler's probability is off; one that gives 1 / 1.21 is not."""
    assert mismatch(np.array([math.log(1.21)]), np.array([0.0])).share_off_20pct == 1
    assert mismatch(np.array([-math.log(1.21)]), np.array([0.0])).share_off_20pct == 0


def test_tiny_differences_do_not_drown_in_rounding():
    assert mismatch(np.array([-1 + 1e-6]), np.array([-1.0])).k3 == pytest.approx(5e-13, rel=1e-3)


@settings(max_examples=num_cases(100, in_fuzz=3000), derandomize=True)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=20))
def test_for_any_logprobs_k3_is_never_negative_and_zero_only_if_equal(values):
    trainer, sampler = (np.array(column) for column in zip(*values, strict=True))
    result = mismatch(trainer, sampler)
    assert result.k3 >= 0
    assert 0 <= result.share_off_20pct <= 1
    assert (result.max_abs == 0) == bool((trainer == sampler).all())


@pytest.mark.parametrize("version", [1, 3])
def test_bits_are_compared_with_the_weights_that_sampled_them_only(version):
    """Logprobs of older weights differ in an asynchronous run that is as it should be."""
    other = row([5, 6, 7], sampled=[1, 2], version=version, logprob=-4.0)
    check_same_bits([other], [np.array([-4.5, -4.5], dtype=np.float32)], 2)


def test_a_logprob_of_the_same_weights_with_other_bits_is_named():
    same = row([5, 6, 7], sampled=[1, 2], version=2, logprob=-4.0)
    check_same_bits([same], [np.array([-4.0, -4.0], dtype=np.float32)], 2)
    with pytest.raises(InvariantError, match="1 of 2 logprobs of row 0 differ: at position 2, id 7"):
        check_same_bits([same], [np.array([-4.0, np.nextafter(np.float32(-4), 0)], dtype=np.float32)], 2)


@pytest.mark.parametrize(
    ("trainer", "sampler", "message"),
    [
        ([], [], r"N >= 1, got \(0,\), \(0,\)"),
        ([0.0], [0.0, 0.0], r"got \(1,\), \(2,\)"),
        ([0.0, math.nan], [0.0, 0.0], r"^logprobs\[1\] is nan: compare sampled ids only"),
        ([0.0, 0.0], [math.nan, 0.0], r"^rollout_logprobs\[0\] is nan"),
    ],
)
def test_what_cannot_be_compared_is_refused(trainer, sampler, message):
    with pytest.raises(InvalidInputError, match=message):
        mismatch(np.array(trainer), np.array(sampler))


def test_rows_are_compared_on_their_sampled_ids_only():
    rows = [row([1, 2, 3], sampled=[1, 2]), row([4, 5, 6, 7], sampled=[2])]
    logprobs = [np.where(r.sampled_mask, r.rollout_logprobs, np.nan) for r in rows]
    logprobs[1][2] += 0.5
    found = mismatch_of_rows(rows, logprobs)
    assert found.num_tokens == 3
    assert found.max_abs == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        ([], "one array for each of 1 samples, got 0"),
        ([np.zeros(2, np.float32)], r"logprobs\[0\] has 2 entries for 3 token_ids"),
        ([np.full(3, np.nan, np.float32)], "nan"),
    ],
)
def test_logprobs_that_are_not_the_rows_own_are_an_error(logprobs, says):
    with pytest.raises(InvalidInputError, match=says):
        mismatch_of_rows([row([1, 2, 3], sampled=[1, 2])], logprobs)


def test_no_rows_have_nothing_to_compare():
    with pytest.raises(InvalidInputError, match="N >= 1"):
        mismatch_of_rows([], [])


def test_k3_is_split_by_lag():
    sampler = np.log([0.5, 0.25, 0.5])
    trainer = np.log([0.25, 0.25, 0.25])
    k3 = 0.5 - 1 - math.log(0.5)
    split = k3_by_lag(trainer, sampler, np.array([0, 3, 2], dtype=np.int32))
    assert split == {"0": pytest.approx(k3), "1": None, "2_plus": pytest.approx(k3 / 2)}


def test_lags_of_other_tokens_are_refused():
    with pytest.raises(InvalidInputError, match=r"shape of logprobs, \(2,\), got \(1,\)"):
        k3_by_lag(np.zeros(2), np.zeros(2), np.zeros(1, dtype=np.int32))


def one_row(num_ids: int, *, versions: list[int] | None = None) -> TrainingSample:
    """A row of one given id and so many that were sampled, each with the logprob -1."""
    ids = np.arange(num_ids + 1) % 50
    sampled = ids == ids
    sampled[0] = False
    own = np.full(num_ids + 1, -1) if versions is None else np.array([-1, *versions])
    if versions is None:
        own[1:] = 3
    return TrainingSample(
        token_ids=ids,
        sampled_mask=sampled,
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, -1.0, np.nan),
        policy_versions=own,
        advantages=np.zeros(num_ids + 1),
    )


def compare(row: TrainingSample, difference: float, *, max_k3: float = 0.02) -> Mismatch | None:
    logprobs = np.full(int(row.loss_mask.sum()), -1.0 + difference, np.float32)
    return check_one_policy([row], [logprobs], policy_version=3, max_k3=max_k3)


def test_i9_two_policies_are_named_with_both_numbers_and_rounding_is_none():
    found = compare(one_row(300), 0.1)
    assert found is not None
    assert found.k3 == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-5)
    with pytest.raises(
        PolicyMismatchError, match=r"k3 is 0.107 over 300 ids .* by policy version 3, .* up to 0.02;"
    ) as raised:
        compare(one_row(300), -0.5)
    assert "of id 1 with -1 from the sampler and -1.5 from the trainer" in str(raised.value)
    assert compare(one_row(300), -0.5, max_k3=math.inf) is not None


def test_i9_few_ids_are_judged_as_if_the_others_of_256_agreed():
    """One improbable id of ten: k3 0.1, which is 0.005 of 256."""
    assert compare(one_row(10), -0.5) is not None
    with pytest.raises(PolicyMismatchError):
        compare(one_row(10), -2.0)


def test_i9_rows_with_ids_of_other_weights_are_no_evidence():
    """Also of their later ids: those may have been sampled with keys and values of the older weights."""
    assert compare(one_row(4, versions=[2, 2, 3, 3]), -9.0) is None
    assert compare(one_row(4, versions=[2, 2, 2, 2]), -9.0) is None
    with pytest.raises(PolicyMismatchError):
        compare(one_row(4, versions=[3, 3, 3, 3]), -9.0)
