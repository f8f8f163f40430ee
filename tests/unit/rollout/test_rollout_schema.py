"""Functions as JSON schemas, and arguments held against them."""

import functools
import math
from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from unbroken.errors import ToolDefinitionError
from unbroken.rollout.tools import describe_function, find_problem


def search(
    query: str,
    limit: int = 10,
    weight: float = 1.0,
    exact: bool = False,
    fields: list[str] | None = None,
    scores: dict[str, float] | None = None,
    order: Literal["asc", "desc"] = "asc",
    key: int | str = 0,
    extra: Any = None,
    nested: list[list[int]] | dict[str, str] = [],  # noqa: B006
    record: dict[str, Any] = {},  # noqa: B006
    rows: list[Any] | None = None,
) -> list[str]:
    """Search the shelves.

    The second paragraph is part of the description.

    Args:
        query: What to look for,
            on two lines.
        limit (int): Most hits.
        weight: A weight.
        exact: Whether to match exactly.
        fields: Which fields.
        scores: Scores by field.
        order: The order.
        key: A key.
        extra: Anything.
        nested: Lists of lists.
        record: Any values.
        rows: Any rows.

    Returns:
        The hits.
    """
    return [query]


def test_a_schema_has_the_form_that_templates_were_written_for():
    def plain(
        query: str,
        limit: int = 10,
        weight: float = 1.0,
        exact: bool = False,
        fields: list[str] | None = None,
        scores: dict[str, float] | None = None,
        order: Literal["asc", "desc"] = "asc",
        key: int | str = 0,
        extra: Any = None,
    ):
        """Search the shelves.

        Args:
            query: What to look for,
                on two lines.
            limit: Most hits.
            weight: A weight.
            exact: Whether to match exactly.
            fields: Which fields.
            scores: Scores by field.
            order: The order.
            key: A key.
            extra: Anything.
        """

    assert describe_function(plain) == get_json_schema(plain)


def test_a_union_of_containers_says_what_each_of_them_holds():
    def plain(nested: list[list[int]] | dict[str, str]):
        """Search the shelves.

        Args:
            nested: Either.
        """

    described = describe_function(plain)["function"]["parameters"]["properties"]["nested"]
    lists = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    names = {"type": "object", "additionalProperties": {"type": "string"}}
    assert described == {"anyOf": [lists, names], "description": "Either."}


def test_a_description_is_all_that_stands_above_the_first_section():
    function = describe_function(search)["function"]
    assert function["description"] == "Search the shelves.\n\nThe second paragraph is part of the description."
    assert function["parameters"]["properties"]["query"]["description"] == "What to look for, on two lines."
    assert function["parameters"]["properties"]["limit"]["description"] == "Most hits."


def test_a_function_without_parameters_is_a_tool():
    def now() -> str:
        """Tell the time."""
        return "noon"

    schema = describe_function(now)
    assert schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert find_problem(schema, {}) is None
    assert find_problem(schema, {"zone": "x"}) == "unexpected argument 'zone'; the arguments are []"


def test_a_bound_method_is_described_without_self():
    class Shelf:
        def look(self, row: int) -> str:
            """Look.

            Args:
                row: The row.
            """
            return str(row)

    assert list(describe_function(Shelf().look)["function"]["parameters"]["properties"]) == ["row"]


def untyped(query):
    """Search.

    Args:
        query: What.
    """


def undocumented(query: str, limit: int):
    """Search.

    Args:
        query: What.
    """


def overdocumented(query: str):
    """Search.

    Args:
        query: What.
        limit: Not there.
    """


def no_docstring(query: str):
    return query


def only_sections(query: str):
    """
    Args:
        query: What.
    """


def unresolved(query: "Missing"):  # type: ignore[name-defined]  # noqa: F821
    """Search.

    Args:
        query: What.
    """


def own_class(where: functools.partial):
    """Search.

    Args:
        where: Where.
    """


def unknown_in_list(where: list[bytes]):
    """Search.

    Args:
        where: Where.
    """


def integer_keys(where: dict[int, str]):
    """Search.

    Args:
        where: Where.
    """


def starred(*query: str):
    """Search.

    Args:
        query: What.
    """


def keyworded(**query: str):
    """Search.

    Args:
        query: What.
    """


def positional(query: str, /):
    """Search.

    Args:
        query: What.
    """


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "tool untyped, parameter query: needs a type annotation"),
        (undocumented, "tool undocumented, parameter limit: needs a line `limit: ...` under Args"),
        (overdocumented, r"tool overdocumented: the docstring's Args describe \['limit'\]"),
        (no_docstring, "tool no_docstring: needs a docstring"),
        (only_sections, "tool only_sections: needs a docstring that begins with what the tool does"),
        (unresolved, "tool unresolved: the signature cannot be read: name 'Missing' is not defined"),
        (own_class, "tool own_class, parameter where: type .*partial.* cannot be described in JSON; use str, int"),
        (unknown_in_list, "parameter where: type <class 'bytes'> cannot be described"),
        (integer_keys, r"parameter where: type dict\[int, str\] cannot be described"),
        (starred, "parameter query: must be passed by name, got variadic positional"),
        (keyworded, "parameter query: must be passed by name, got variadic keyword"),
        (positional, "parameter query: must be passed by name, got positional-only"),
        (lambda query: query, "a tool must be a function with a name"),
        (functools.partial(search, query="x"), "a tool must be a function with a name"),
        (dict, "a tool must be a function with a name"),
        (dict.fromkeys, "tool fromkeys"),
        (math.hypot, "tool hypot"),
        (42, "a tool must be a function with a name"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_by_name_parameter_and_rule(function, says):
    with pytest.raises(ToolDefinitionError, match=says):
        describe_function(function)


@pytest.mark.parametrize("hint", ["math.nothing", "Literal[", [1], {}, list[[1]], list[int, str], dict[str], 3, ...])
def test_an_annotation_that_is_no_type_is_refused(hint):
    def look(row):
        """Look.

        Args:
            row: The row.
        """

    look.__annotations__["row"] = hint
    with pytest.raises(ToolDefinitionError, match="tool look"):
        describe_function(look)


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "x"},
        {"query": "", "limit": 3, "weight": 1, "exact": True},
        {"query": "x", "fields": None, "scores": {"a": 1, "b": 0.5}},
        {"query": "x", "fields": [], "order": "desc", "key": "k", "extra": {"any": [1]}},
        {"query": "x", "nested": [[1], []]},
        {"query": "x", "nested": {"a": "b"}},
    ],
)
def test_arguments_that_fit_are_no_problem(arguments):
    assert find_problem(describe_function(search), arguments) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "missing argument 'query'"),
        ({"query": "x", "size": 3}, "unexpected argument 'size'; the arguments are ['query', "),
        ({"query": 3}, "argument 'query' must be string, got 3"),
        ({"query": None}, "argument 'query' must be string, got None"),
        ({"query": "x", "limit": "3"}, "argument 'limit' must be integer, got '3'"),
        ({"query": "x", "limit": 3.0}, "argument 'limit' must be integer, got 3.0"),
        ({"query": "x", "limit": True}, "argument 'limit' must be integer, got True"),
        ({"query": "x", "weight": True}, "argument 'weight' must be number, got True"),
        ({"query": "x", "exact": 1}, "argument 'exact' must be boolean, got 1"),
        ({"query": "x", "fields": ["a", 1]}, "argument 'fields' must be array of string or null, got ['a', 1]"),
        ({"query": "x", "scores": {"a": "b"}}, "must be object with values of type number or null"),
        ({"query": "x", "order": "up"}, "argument 'order' must be one of ['asc', 'desc'], got 'up'"),
        ({"query": "x", "key": 1.5}, "argument 'key' must be integer or string, got 1.5"),
        ({"query": "x", "nested": [1]}, "must be array of array of integer or object with values of type string"),
        ({"query": "x", "record": "y"}, "must be object with values of type anything, got 'y'"),
        ({"query": "x", "rows": "y"}, "must be array of anything or null, got 'y'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_apart_in_words(arguments, says):
    problem = find_problem(describe_function(search), arguments)
    assert problem is not None
    assert says in problem


def test_an_old_style_optional_is_the_same_as_a_union_with_none():
    def look(row: Optional[int] = None):  # noqa: UP045
        """Look.

        Args:
            row: The row.
        """

    assert describe_function(look)["function"]["parameters"]["properties"]["row"] == {
        "type": "integer",
        "nullable": True,
        "description": "The row.",
    }


def test_text_behind_the_args_section_is_not_read_as_parameters():
    def look(row: int):
        """Look.

        Args:
            row: The row.

                With more of it: here.

        Afterwards: nothing.
        """

    assert describe_function(look)["function"]["parameters"]["properties"]["row"]["description"] == (
        "The row. With more of it: here."
    )
