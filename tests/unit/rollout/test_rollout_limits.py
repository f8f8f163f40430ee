"""Limits: the least of what is allowed, and which one it was."""

import math

import pytest

from unbroken.errors import InvalidInputError
from unbroken.rollout.limits import Limit, Limits, TurnBudget

LIMITS = Limits(max_turns=3, max_tokens=100, timeout_s=60)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_turns", 0),
        ("max_turns", 2.0),
        ("max_turns", True),
        ("max_tokens", -1),
        ("max_tokens", None),
        ("timeout_s", 0),
        ("turn_timeout_s", 0),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("timeout_s", "5"),
        ("timeout_s", None),
        ("close_timeout_s", True),
        ("max_result_chars", 0),
        ("max_result_chars", "9"),
        ("thinking_tokens", 0),
        ("thinking_tokens", True),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(InvalidInputError, match=rf"{field} must be .* got {value!r}"):
        Limits(**{field: value})


@pytest.mark.parametrize(
    ("turn", "num_sampled", "context_left", "budget"),
    [
        (50, 0, 1000, TurnBudget(max_tokens=50, limit=Limit.TURN)),
        (50, 60, 1000, TurnBudget(max_tokens=40, limit=Limit.TOKENS)),
        (50, 60, 30, TurnBudget(max_tokens=30, limit=Limit.CONTEXT)),
        (50, 0, 0, TurnBudget(max_tokens=0, limit=Limit.CONTEXT)),
        (40, 60, 40, TurnBudget(max_tokens=40, limit=Limit.TOKENS)),
    ],
)
def test_a_turn_may_sample_the_least_of_what_is_left(turn, num_sampled, context_left, budget):
    assert (
        LIMITS.compute_turn_budget(turn_max_tokens=turn, num_sampled=num_sampled, num_context_left=context_left)
        == budget
    )


@pytest.mark.parametrize(
    ("num_turns", "num_sampled", "limit"),
    [(0, 0, None), (2, 99, None), (3, 0, Limit.TURNS), (2, 100, Limit.TOKENS), (3, 100, Limit.TURNS)],
)
def test_a_limit_that_is_reached_allows_no_further_turn(num_turns, num_sampled, limit):
    assert LIMITS.find_reached(num_turns=num_turns, num_sampled=num_sampled) is limit
