"""Mistral's two forms, with the ids that the model writes for its calls."""

import pytest

from support.parsing import FormatOnTokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import MISTRAL

CONTROL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
FORM = FormatOnTokenizer(MISTRAL, control=CONTROL, stops=("</s>",))
LIST = '[{"name": "add", "arguments": {"a": 1}, "id": "9aF2kQ0zX"}, {"name": "now", "arguments": {}}]'


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (f"[TOOL_CALLS] {LIST}</s>", ["9aF2kQ0zX", ""]),
        (f"[TOOL_CALLS]{LIST}", ["9aF2kQ0zX", ""]),
        ('[TOOL_CALLS]add[CALL_ID]9aF2kQ0zX[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}</s>', ["9aF2kQ0zX", ""]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]</s>', ["", ""]),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}</s>', ["", ""]),
    ],
)
def test_both_forms_are_read(text: str, ids: list[str]) -> None:
    calls = FORM.parse(text).tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1}), ("now", {})]
    assert [call.call_id for call in calls] == ids
    assert calls[0].span[1] <= calls[1].span[0]


def test_reasoning_and_content_stand_before_the_calls() -> None:
    parsed = FORM.parse(f"[THINK]add them[/THINK]Let me see.[TOOL_CALLS]{LIST}</s>")
    assert (parsed.reasoning, parsed.content, len(parsed.tool_calls)) == ("add them", "Let me see.", 2)


def test_a_spelled_delimiter_is_text() -> None:
    parsed = FORM.parser.parse([*FORM.spelled('[TOOL_CALLS][{"name": "f", "arguments": {}}]'), *FORM.ids("</s>")])
    assert parsed.tool_calls == ()
    text = "[TOOL_CALLS]f[ARGS]"
    ids = [*FORM.ids(text), *FORM.spelled('{"a": "x[ARGS]y"}')]
    assert FORM.parser.parse(ids).tool_calls[0].arguments == {"a": "x[ARGS]y"}


@pytest.mark.parametrize(
    ("text", "status", "span"),
    [
        ("[TOOL_CALLS]f[ARGS]{</s>", ToolCallStatus.INVALID_JSON, "[TOOL_CALLS]f[ARGS]{"),
        ("[TOOL_CALLS]f[ARGS]{", ToolCallStatus.UNCLOSED, "[TOOL_CALLS]f[ARGS]{"),
        ("[TOOL_CALLS]f[ARGS]", ToolCallStatus.UNCLOSED, "[TOOL_CALLS]f[ARGS]"),
        ("[TOOL_CALLS]f[ARGS] \n", ToolCallStatus.UNCLOSED, "[TOOL_CALLS]f[ARGS] \n"),
        ("[TOOL_CALLS]f[ARGS]3</s>", ToolCallStatus.INVALID_ARGUMENTS, "[TOOL_CALLS]f[ARGS]3"),
        ("[TOOL_CALLS] [ARGS]{}</s>", ToolCallStatus.MISSING_NAME, "[TOOL_CALLS] [ARGS]{}"),
        ("[TOOL_CALLS]f[ARGS]{}[CALL_ID]x</s>", ToolCallStatus.INVALID_SYNTAX, "[TOOL_CALLS]f[ARGS]{}[CALL_ID]x"),
        ("[TOOL_CALLS]f[ARGS]{}[ARGS]{}</s>", ToolCallStatus.INVALID_SYNTAX, "[TOOL_CALLS]f[ARGS]{}[ARGS]{}"),
        ("[TOOL_CALLS]f[CALL_ID]x</s>", ToolCallStatus.INVALID_SYNTAX, "[TOOL_CALLS]f[CALL_ID]x"),
        ("[TOOL_CALLS]words</s>", ToolCallStatus.INVALID_JSON, "words"),
        ('[TOOL_CALLS][{"arguments": {}}]</s>', ToolCallStatus.MISSING_NAME, '{"arguments": {}}'),
    ],
)
def test_a_malformed_call_is_data_with_its_status_and_span(text: str, status: ToolCallStatus, span: str) -> None:
    (call,) = FORM.parse(text).tool_calls
    assert call.status is status
    assert call.name == ("f" if "f[ARGS]{<" in text or text.endswith(("f[ARGS]{", "f[ARGS]3</s>")) else "")
    assert [part for kind, part in FORM.parts(text) if kind == "tool_call"] == [span]
