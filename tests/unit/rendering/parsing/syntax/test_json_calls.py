"""Bodies that hold calls as JSON."""

import pytest

from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.call_format import CallBody
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader, make_json_calls_reader

OK, NO_JSON, NAMELESS = ToolCallStatus.OK, ToolCallStatus.INVALID_JSON, ToolCallStatus.MISSING_NAME
F, G = '{"name": "f", "arguments": {"x": "]"}}', '{"name": "g", "arguments": {}}'


def read(text: str) -> list[tuple[ToolCallStatus, str]]:
    """Status and text of each attempt."""
    attempts = make_json_calls_reader()(CallBody(text=text), ())
    return [(a.status, text if a.span is None else text[slice(*a.span)]) for a in attempts]


@pytest.mark.parametrize(
    "text", [f"[{F}, {G}]", f" [\n{F},\n{G}\n]\n", f"{F}\n{G}", f"{F}; {G}", f"{F}{G}", f"[{F},{G},]"]
)
def test_calls_in_a_list_or_one_after_the_other_are_found(text: str) -> None:
    assert read(text) == [(OK, F), (OK, G)]


@pytest.mark.parametrize("text", ["", " \n", "[]", "[ ]", " [\n] "])
def test_no_calls_are_no_attempts(text: str) -> None:
    assert read(text) == []


@pytest.mark.parametrize(
    ("text", "attempts"),
    [
        (f"[{F}, oops]", [(OK, F), (NO_JSON, "oops]")]),
        (f"{F} oops {G} ", [(OK, F), (NO_JSON, f"oops {G}")]),
        (f"[{F}] oops", [(OK, F), (NO_JSON, "oops")]),
        (f"[{F}]]", [(OK, F), (NO_JSON, "]")]),
        (f"{F}]", [(OK, F), (NO_JSON, "]")]),
        (f"[{F}, {G}", [(NO_JSON, f"[{F}, {G}")]),
        (f"[{F}, oops", [(NO_JSON, f"[{F}, oops")]),
        ("[", [(NO_JSON, "[")]),
        ("[[5]", [(NO_JSON, "[[5]")]),
        ("[5, {}]", [(NAMELESS, "5"), (NAMELESS, "{}")]),
        (f"[[{F}]]", [(NAMELESS, f"[{F}]")]),
        ("[" * 5000, [(NO_JSON, "[" * 5000)]),
        ('[{"name": "f", "arguments": {"x": NaN}}]', [(NO_JSON, '{"name": "f", "arguments": {"x": NaN}}]')]),
    ],
)
def test_what_is_no_call_is_an_attempt_with_its_status(text: str, attempts: list[tuple[ToolCallStatus, str]]) -> None:
    assert read(text) == attempts


def test_other_keys_can_be_read_and_the_id_is_kept() -> None:
    read_one = make_json_call_reader(
        name_keys=("tool_name",), arguments_keys=("parameters",), id_keys=("tool_call_id",)
    )
    (attempt,) = read_one(CallBody(text='{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}'), ())
    assert (attempt.status, attempt.name, attempt.arguments, attempt.call_id) == (OK, "f", {"a": 1}, "0")
    (attempt,) = read_one(CallBody(text=F), ())
    assert attempt.status is NAMELESS
