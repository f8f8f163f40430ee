"""Every completion id is in exactly one part, with each renderer of the package."""

import random
from typing import Any

import numpy as np
import pytest

from support.package_renderers import NEEDS_A_DOWNLOAD, package_tokenizer
from unbroken.integrations.renderers.registry import load_renderer, package_renderer_names
from unbroken.rendering.base import ParsedResponse, PartKind, ToolCallStatus

NAMES = [name for name in package_renderer_names() if name not in NEEDS_A_DOWNLOAD]


def parse(name: str, text: str) -> tuple[ParsedResponse, list[tuple[str, str]]]:
    """The parse of a text, and its parts as text."""
    tokenizer = package_tokenizer(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parsed = load_renderer(tokenizer, renderer=f"pkg:{name}").parse_response(np.array(ids, dtype=np.int32))
    return parsed, [(part.kind.value, tokenizer.decode(ids[slice(*part.span)])) for part in parsed.parts]


def test_a_turn_that_reasons_answers_and_calls_has_a_part_of_each() -> None:
    text = '<think>hm</think>so<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"na<|im_end|>'
    parsed, parts = parse("qwen3", text)
    assert parts == [
        ("reasoning", "<think>hm"),
        ("markup", "</think>"),
        ("content", "so"),
        ("tool_call", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("tool_call", '<tool_call>{"na'),
        ("stop", "<|im_end|>"),
    ]
    assert [call.status for call in parsed.tool_calls] == [ToolCallStatus.OK, ToolCallStatus.UNCLOSED]


def test_a_turn_that_was_cut_inside_its_reasoning_is_reasoning() -> None:
    parsed, parts = parse("qwen3", "<think>hm, so")
    assert not parsed.reasoning_complete
    assert parts == [("reasoning", "<think>hm, so")]


def test_an_answer_is_content() -> None:
    assert parse("qwen3", "so")[1] == [("content", "so")]


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
    )
    (call,) = parse("kimi-k2", text)[0].tool_calls
    assert (call.status, call.name, call.call_id) == (ToolCallStatus.OK, "f", "functions.f:3")


@pytest.mark.parametrize(("tool", "a"), [("f", "1"), ("g", 1)])
def test_a_call_of_an_unknown_tool_is_a_call_and_loses_only_the_schemas_types(tool: str, a: object) -> None:
    """GLM writes all arguments as text: that `a` is a string only the schema tells."""
    tokenizer = package_tokenizer("glm-4.5")
    ids = tokenizer.encode(
        "</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", add_special_tokens=False
    )
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema: Any = {"type": "function", "function": {"name": tool, "description": "", "parameters": parameters}}
    renderer = load_renderer(tokenizer, renderer="pkg:glm-4.5")
    (call,) = renderer.parse_response(np.array(ids, dtype=np.int32), tools=[schema]).tool_calls
    assert (call.status, call.name, call.arguments) == (ToolCallStatus.OK, "f", {"a": a})


@pytest.mark.parametrize("name", NAMES)
def test_every_id_of_whatever_was_sampled_is_in_one_part(name: str) -> None:
    tokenizer = package_tokenizer(name, template="trl/qwen3" if name == "default" else None)
    renderer = load_renderer(tokenizer, renderer=f"pkg:{name}")
    first_control = len(tokenizer) - len(tokenizer.get_added_vocab())
    rng = random.Random(name)
    num_calls = 0
    for _ in range(300):
        ranges = [(0, first_control), (first_control, len(tokenizer))]
        ids = [rng.randrange(*rng.choice(ranges)) for _ in range(rng.randrange(30))]
        parsed = renderer.parse_response(np.array(ids, dtype=np.int32))
        spans = [part.span for part in parsed.parts]
        assert [k for span in spans for k in range(*span)] == list(range(len(ids)))
        assert all(start < stop for start, stop in spans)
        assert all(0 <= start <= stop <= len(ids) for start, stop in (call.span for call in parsed.tool_calls))
        called = sum(part.kind is PartKind.TOOL_CALL for part in parsed.parts)
        assert bool(called) == any(start < stop for start, stop in (call.span for call in parsed.tool_calls))
        num_calls += called
    assert num_calls or name in ("default", "deepseek-v4", "llama-3")  # random ids do not make calls of these
