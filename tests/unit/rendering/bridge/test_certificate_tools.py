"""Certificates hold for other tools exactly where no tools change the text after a turn (I1)."""

from typing import Any

import numpy as np
import pytest

from support.templates import TOOLS_IN_LAST_QUESTION, chatml_with
from support.tokenizers import make_tokenizer
from unbroken.errors import ToolDefinitionError
from unbroken.rendering.base import Bridge, RefusalReason
from unbroken.rendering.bridge.certificates.certificate import Certificate
from unbroken.rendering.template import TemplateRenderer

EXTRA = "{{- '<|im_start|>system\\nextra<|im_end|>\\n' -}}"
QUESTION: Any = {"role": "user", "content": "hi"}
TURN: Any = {"role": "assistant", "content": "so"}
NEW: Any = {"role": "user", "content": "go on"}


def tool(name: str = "add", *, description: str = "adds", **parameters: Any) -> Any:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "description": "a number"}}, **parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


RETURNING = {"type": "function", "function": {"name": "add", "returns": {"type": "integer"}}}


def renderer_when(condition: str) -> TemplateRenderer:
    """A renderer whose template writes another message before the generation prompt under a condition on the tools."""
    return TemplateRenderer(
        make_tokenizer(chatml_with(before_prompt=f"{{%- if {condition} -%}}{EXTRA}{{%- endif -%}}"))
    )


def bridge_with(renderer: TemplateRenderer, tools: Any) -> Any:
    prompt = renderer.render([QUESTION], tools=tools)
    end = np.array([renderer.facts.control_tokens.get_id("<|im_end|>")], np.int32)
    bridge = renderer.bridge_to_next_turn(prompt.token_ids, end, [NEW], assistant=TURN, tools=tools, earlier=[QUESTION])
    if isinstance(bridge, Bridge):
        whole = renderer.render([QUESTION, TURN, NEW], tools=tools).token_ids
        assert whole[len(whole) - len(bridge.bridge_ids) :].tolist() == bridge.bridge_ids.tolist()
    return bridge


def test_one_certificate_holds_for_all_tools_of_a_template_that_writes_them_first():
    renderer = TemplateRenderer(make_tokenizer(chatml_with()))
    for number in range(20):
        assert isinstance(bridge_with(renderer, [tool(f"tool_{number}")]), Bridge)
    (record,) = renderer.certificates()
    assert record.num_tools is None
    assert isinstance(record.outcome, Certificate)
    assert not record.outcome.needs_tools


def test_tools_are_part_of_the_key_where_the_template_writes_them_after_the_turn():
    renderer = TemplateRenderer(make_tokenizer(TOOLS_IN_LAST_QUESTION))
    assert isinstance(bridge_with(renderer, [tool("add")]), Bridge)
    assert isinstance(bridge_with(renderer, [tool("sub"), tool("mul")]), Bridge)
    assert isinstance(bridge_with(renderer, [tool("add")]), Bridge)
    assert [record.num_tools for record in renderer.certificates()] == [None, 1, 2]


@pytest.mark.parametrize(
    ("condition", "usual", "special"),
    [
        ("tools", [], [tool()]),
        ("tools and tools | length > 5", [tool()], [tool(f"t{k}") for k in range(6)]),
        ("tools and tools[0].function.name == 'browser'", [tool()], [tool("browser")]),
        ("tools and 'python' in (tools | tojson)", [tool()], [tool(description="runs python code")]),
        ("tools and tools[0].function.parameters.required", [tool()], [tool(required=["x"])]),
        ("tools and (tools | tojson | length) > 3000", [tool()], [tool(description="long " * 1000)]),
        (
            "tools and tools[0].function.returns is defined",
            [tool()],
            [RETURNING],
        ),
        ("tools and (tools[0].function.name | length) % 7 == 6", [tool()], [tool("sixsix")]),
    ],
    ids=["any", "number", "name", "text", "required", "length", "unknown_key", "outside_the_panel"],
)
def test_a_bridge_that_depends_on_the_tools_is_exact_for_each_of_them(condition, usual, special):
    renderer = renderer_when(condition)
    for tools in (usual, special, usual):
        assert isinstance(bridge_with(renderer, tools), Bridge)


def test_the_first_tools_do_not_decide_for_those_that_come_later():
    renderer = renderer_when("tools and (tools[0].function.name | length) % 7 == 6")
    plain, odd = bridge_with(renderer, [tool("add")]), bridge_with(renderer, [tool("sixsix")])
    assert len(odd.bridge_ids) > len(plain.bridge_ids)
    assert [record.num_tools for record in renderer.certificates()] == [None, 1]


def test_a_revoked_bridge_is_refused_with_all_tools():
    renderer = TemplateRenderer(make_tokenizer(chatml_with()))
    assert isinstance(bridge_with(renderer, [tool("add")]), Bridge)
    renderer.revoke_bridge([NEW], assistant=TURN, tools=[tool("add")], detail="wrong")
    assert bridge_with(renderer, [tool("sub")]).reason is RefusalReason.FAILED_AUDIT


def test_malformed_tools_are_refused_also_when_others_were_certified():
    renderer = TemplateRenderer(make_tokenizer(chatml_with()))
    assert isinstance(bridge_with(renderer, [tool()]), Bridge)
    for _ in range(2):
        with pytest.raises(ToolDefinitionError, match=r"tools\[0\] must be a mapping"):
            renderer.bridge_to_next_turn(np.array([1]), np.array([2]), [NEW], assistant=TURN, tools=["add"])  # type: ignore[list-item]
