"""For any types of a tool and any arguments of a model: the arguments fit, or an error for the model says why not."""

from __future__ import annotations

import json
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from unbroken.rollout.tools import describe_function, find_problem

ANY_CASE = settings(max_examples=num_cases(200, in_fuzz=5000), derandomize=True)

HINTS = st.recursive(
    st.sampled_from([str, int, float, bool, None, Any, list, dict, Literal["a", 1], Literal[None, True]]),
    lambda inner: st.one_of(
        inner.filter(lambda hint: hint is not None).map(lambda hint: list[hint]),
        inner.filter(lambda hint: hint is not None).map(lambda hint: dict[str, hint]),
        st.tuples(inner, inner).map(lambda pair: Literal["b"] | pair[0] | pair[1]),
        inner.map(lambda hint: hint if hint is None else hint | None),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.sampled_from(["a", "b"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.one_of(st.sampled_from(["row", "column"]), st.text(max_size=3)), VALUES, max_size=3)


def schema_of(row: Any, column: Any):
    def look(row, column=None):
        """Look.

        Args:
            row: The row.
            column: The column.
        """

    look.__annotations__ |= {"row": row, "column": column}
    return describe_function(look)


@ANY_CASE
@given(HINTS, HINTS, ARGUMENTS)
def test_for_any_tool_and_any_arguments_there_is_an_answer(row, column, arguments):
    schema = schema_of(row, column)
    json.dumps(schema)
    problem = find_problem(schema, arguments)
    assert problem is None or "argument" in problem
    if set(arguments) - {"row", "column"} or "row" not in arguments:
        assert problem is not None


@ANY_CASE
@given(VALUES, VALUES)
def test_for_any_values_a_tool_of_any_takes_them(row, column):
    assert find_problem(schema_of(Any, Any), {"row": row, "column": column}) is None
