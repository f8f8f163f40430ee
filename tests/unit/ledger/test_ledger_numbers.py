"""One number, finite in float32, or an error that says what came."""

import numpy as np
import pytest

from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.numbers import MAX_FLOAT32, to_finite_float32


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.float16(1)])
def test_any_plain_number_becomes_a_float(value):
    assert to_finite_float32(value, name="x") == 1.0
    assert type(to_finite_float32(value, name="x")) is float


def test_the_largest_float32_is_the_largest_that_passes():
    assert to_finite_float32(-MAX_FLOAT32, name="x") == -MAX_FLOAT32
    with pytest.raises(InvalidInputError):
        to_finite_float32(np.nextafter(MAX_FLOAT32, np.inf), name="x")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "x must be finite in float32, got nan"),
        (float("-inf"), "x must be finite in float32, got -inf"),
        (1e39, r"x must be finite in float32, got 1e\+39"),
        (10**400, "x must be finite in float32, got an integer of 1329 bits"),
        pytest.param(-(10**5000), "x must be finite in float32, got an integer of 16610 bits", id="too long to print"),
        (None, r"x must be one number, got None \(NoneType\)"),
        ("1", r"x must be one number, got '1' \(str\)"),
        ([1.0], r"x must be one number, got \[1\.0\] \(list\)"),
        (1j, r"x must be one number, got 1j \(complex\)"),
        (np.ones(2), r"x must be one number, got shape \(2,\) \(ndarray\)"),
        (np.ones(()), r"x must be one number, got shape \(\) \(ndarray\)"),
    ],
)
def test_anything_else_is_refused_with_its_name_and_what_came(value, says):
    with pytest.raises(RewardError, match=says):
        to_finite_float32(value, name="x", error=RewardError)
