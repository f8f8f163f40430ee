"""Arguments written as text become values by the tool's schema."""

from typing import Any

import pytest

from support.parsing import tool
from unbroken.rendering.parsing.syntax.arguments import convert_arguments, convert_value

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", STRING, "5"),
        ("null", STRING, "null"),
        ("null", {"type": "string", "default": None}, None),
        ("null", {"type": "string", "default": "null"}, "null"),
        ("nulls", {"type": "string", "default": None}, "nulls"),
        ("5", {"type": "string", "default": None}, "5"),
        ('"x"', STRING, '"x"'),
        ('"x"', {"type": ["string", "null"]}, '"x"'),
        ('"x"', None, "x"),
        (" x\n", STRING, " x\n"),
        ("5", INTEGER, 5),
        ("five", INTEGER, "five"),
        ("5", {"type": "number"}, 5),
        ("0.5", {"type": "number"}, 0.5),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", {"type": "integer", "nullable": True}, None),
        ("None", INTEGER, "None"),
        ('["x", 1]', {"type": "array"}, ["x", 1]),
        ('{"a": null}', {"type": "object"}, {"a": None}),
        ("5", {"anyOf": [STRING, INTEGER]}, 5),
        ("0.5", {"anyOf": [STRING, INTEGER]}, "0.5"),
        ("5", {"oneOf": [STRING, {"type": "number"}]}, 5),
        ("null", {"anyOf": [STRING, NULL]}, None),
        ("five", {"anyOf": [STRING, NULL]}, "five"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("5", {"const": "5"}, "5"),
        ("5", {"$ref": "#/$defs/Code"}, "5"),
        ("5", {"$ref": "#/$defs/Loop"}, 5),
        ("5", {"$ref": "#/$defs/Missing"}, 5),
        ("5", {"anyOf": [STRING, {"description": "anything"}]}, 5),
        *(
            (text, schema, text)
            for text in ("NaN", "-Infinity", "1e999", "9" * 309, '"\\ud800"', "[" * 101 + "]" * 101, "[" * 5000)
            for schema in (None, INTEGER)
        ),
        ("5", None, 5),
        ('{"a": 1}', {}, {"a": 1}),
        ("True", None, "True"),
        ("", None, ""),
    ],
)
def test_a_value_has_the_type_that_the_schema_says(text: str, schema: Any, value: Any) -> None:
    root = {"$defs": {"Code": STRING, "Loop": {"$ref": "#/$defs/Loop"}}}
    found = convert_value(text, schema, root)
    assert found == value
    assert type(found) is type(value)


def test_the_schema_is_that_of_the_tool_and_the_parameter_with_the_name() -> None:
    tools = [tool("f", a=STRING), tool("g", a=INTEGER)]
    assert convert_arguments({"a": "1", "b": "1"}, "f", tools) == {"a": "1", "b": 1}
    assert convert_arguments({"a": "1"}, "g", tools) == {"a": 1}
    assert convert_arguments({"a": "1"}, "h", tools) == {"a": 1}


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"function": None},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "parameters": []}},
        tool("f", a=[]),
    ],
)
def test_a_tool_without_a_schema_says_nothing(broken: Any) -> None:
    assert convert_arguments({"a": "1"}, "f", [broken]) == {"a": 1}
