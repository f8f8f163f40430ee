"""What the templates of the installed packages render is read back: the format is found, and nothing is lost."""

from typing import Any

import pytest

from support.corpus import CorpusTemplate, corpus_templates
from support.parsing import tool
from unbroken.rendering.base import PartKind, ToolCallStatus
from unbroken.rendering.parsing.formats import FORMATS
from unbroken.rendering.template import TemplateRenderer

PARSERS = {
    "glm4moe": "glm",
    "nemotron_3": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "template_minicpmv45": "hermes",
    "template_chatml": "hermes",
}
"""By the beginning of a template's file name, the longest counts; what is not here is not tested here."""
REASONING = "I think,\nso I am."
QUESTION: Any = {"role": "user", "content": "What now?"}
ARGUMENTS: dict[str, Any] = {
    "query": ' two\nlines, "quoted" <b>é 😀</b>',
    "code": "5",
    "limit": 5,
    "ratio": 0.5,
    "exact": True,
    "page": None,
    "tags": ["x", {"y": [1]}],
}
TOOLS = (
    tool(
        "search",
        query={"type": "string"},
        code={"type": "string"},
        limit={"type": "integer"},
        ratio={"type": "number"},
        exact={"type": "boolean"},
        page={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        tags={"type": "array"},
    ),
    tool("stop"),
)


def parser_of(template: CorpusTemplate) -> str | None:
    file = template.name.partition("/")[2]
    return next((PARSERS[k] for k in sorted(PARSERS, key=len, reverse=True) if file.startswith(k)), None)


TESTED = [template for template in corpus_templates() if parser_of(template)]


@pytest.mark.parametrize("template", TESTED, ids=lambda template: template.name)
def test_the_format_is_found_from_the_template(template: CorpusTemplate) -> None:
    assert TemplateRenderer(template.tokenizer()).parser_name == parser_of(template)


def test_every_tested_parser_is_registered() -> None:
    assert set(PARSERS.values()) <= {form.name for form in FORMATS}


def call(name: str, arguments: dict[str, Any], number: int) -> Any:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("num_calls", [0, 1, 2])
@pytest.mark.parametrize("template", TESTED, ids=lambda template: template.name)
def test_a_rendered_turn_is_read_back(template: CorpusTemplate, num_calls: int) -> None:
    tokenizer = template.tokenizer()
    renderer = TemplateRenderer(tokenizer)
    calls = [call("search", ARGUMENTS, 1), call("stop", {}, 2)][:num_calls]
    turn: Any = {"role": "assistant", "content": "Let me see.", **({"tool_calls": calls} if calls else {})}
    prompt_ids = renderer.render([QUESTION], tools=TOOLS).token_ids
    if not tokenizer.decode(prompt_ids).rstrip().endswith("</think>"):
        turn["reasoning_content"] = REASONING
    whole = renderer.render_ids([QUESTION, turn], tools=TOOLS)
    assert whole[: len(prompt_ids)].tolist() == prompt_ids.tolist()
    ids = whole[len(prompt_ids) :]
    text = tokenizer.decode(ids)
    if calls and "search" not in text:
        pytest.skip("the template renders no calls")
    ends = [k for k, token_id in enumerate(ids) if int(token_id) in renderer.facts.turn_end_ids]
    parsed = renderer.parse_response(ids[: ends[-1] + 1] if ends else ids, prompt_ids=prompt_ids, tools=TOOLS)
    assert parsed.content == "Let me see."
    assert parsed.reasoning == (turn.get("reasoning_content", "") if REASONING in text else "")
    assert [c.status for c in parsed.tool_calls] == [ToolCallStatus.OK] * num_calls
    for found, given in zip(parsed.tool_calls, calls, strict=True):
        assert {"name": found.name, "arguments": found.arguments} == given["function"]
    assert (parsed.parts[-1].kind is PartKind.STOP) == bool(ends)
