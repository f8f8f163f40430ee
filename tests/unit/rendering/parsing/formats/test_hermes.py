"""Completions in the Hermes form: calls by id, malformed ones as data."""

from typing import Any

import pytest

from support.templates import CHATML, QWEN, QWEN_THINKING
from support.tokenizers import make_tokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.template import TemplateRenderer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(QWEN_THINKING)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> TemplateRenderer:
    return TemplateRenderer(tokenizer)


def ids_of(tokenizer: Any, text: str) -> Any:
    return tokenizer.encode(text, add_special_tokens=False)


def test_reasoning_text_and_calls_are_separated(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, f"<think>\nadd them\n</think>\n\nLet me see.\n{CALL}\n{CALL}<|im_end|>")
    parsed = renderer.parse_response(ids)
    assert parsed.reasoning == "add them"
    assert parsed.reasoning_complete
    assert parsed.content == "Let me see."
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1})] * 2
    for call in parsed.tool_calls:
        assert tokenizer.decode(ids[slice(*call.span)]) == CALL
        assert call.raw == '\n{"name": "add", "arguments": {"a": 1}}\n'


def test_plain_text_is_content_to_the_last_space(renderer: TemplateRenderer, tokenizer: Any) -> None:
    parsed = renderer.parse_response(ids_of(tokenizer, "  It is 3. \n<|im_end|>"))
    assert parsed.content == "  It is 3. \n"
    assert parsed.tool_calls == ()
    assert parsed.reasoning == ""


def test_only_the_last_id_is_taken_for_the_stop(renderer: TemplateRenderer, tokenizer: Any) -> None:
    parsed = renderer.parse_response(ids_of(tokenizer, "one<|im_end|>two<|endoftext|>three<|im_end|>"))
    assert parsed.content == "one<|im_end|>two<|endoftext|>three"


def test_a_call_spelled_with_ordinary_tokens_is_text(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = [i for character in CALL for i in ids_of(tokenizer, character)]
    assert tokenizer.decode(ids) == CALL
    parsed = renderer.parse_response(ids)
    assert parsed.tool_calls == ()
    assert parsed.content == CALL


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        ("{not json}", ToolCallStatus.INVALID_JSON),
        ("", ToolCallStatus.INVALID_JSON),
        ('{"name": "f", "arguments": {"x": NaN}}', ToolCallStatus.INVALID_JSON),
        ('{"name": "f", "arguments": {"x": [-1e999]}}', ToolCallStatus.INVALID_JSON),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', ToolCallStatus.INVALID_JSON),
        (f'{{"name": "f", "arguments": {{"x": {"9" * 309}}}}}', ToolCallStatus.INVALID_JSON),
        (f'{{"name": "f", "arguments": {{"x": {"[" * 101 + "]" * 101}}}}}', ToolCallStatus.INVALID_JSON),
        ("[" * 5000, ToolCallStatus.INVALID_JSON),
        ("[1]", ToolCallStatus.MISSING_NAME),
        ('{"arguments": {}}', ToolCallStatus.MISSING_NAME),
        ('{"name": "", "arguments": {}}', ToolCallStatus.MISSING_NAME),
        ('{"name": 3, "arguments": {}}', ToolCallStatus.MISSING_NAME),
        ('{"name": "f", "arguments": [1]}', ToolCallStatus.INVALID_ARGUMENTS),
        ('{"name": "f", "parameters": {"a": 1}}', ToolCallStatus.INVALID_ARGUMENTS),
        ('{"name": "f", "arguments": "3"}', ToolCallStatus.INVALID_ARGUMENTS),
        ('{"name": "f", "arguments": "oops"}', ToolCallStatus.INVALID_JSON),
        ('{"name": "f", "arguments": {}}', ToolCallStatus.OK),
    ],
)
def test_a_malformed_call_is_data_with_its_status(
    renderer: TemplateRenderer, tokenizer: Any, raw: str, status: ToolCallStatus
) -> None:
    ids = ids_of(tokenizer, f"ah<tool_call>{raw}</tool_call>{CALL}<|im_end|>")
    parsed = renderer.parse_response(ids)
    assert [call.status for call in parsed.tool_calls] == [status, ToolCallStatus.OK]
    assert parsed.tool_calls[0].raw == raw
    assert parsed.content == "ah"
    assert len(parsed.failures) == (status is not ToolCallStatus.OK)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (', "arguments": "{\\n  \\"city\\": \\"Rome\\"\\n}"', {"city": "Rome"}),
        ("", {}),
        (', "arguments": null', {}),
        (', "arguments": ""', {}),
        (', "arguments": "null"', {}),
    ],
)
def test_arguments_may_be_the_text_of_an_object_null_or_missing(
    renderer: TemplateRenderer, tokenizer: Any, written: str, arguments: dict[str, str]
) -> None:
    ids = ids_of(tokenizer, f'<tool_call>{{"name": "f"{written}}}</tool_call><|im_end|>')
    (call,) = renderer.parse_response(ids).tool_calls
    assert (call.status, call.name, call.arguments) == (ToolCallStatus.OK, "f", arguments)


def test_a_failed_call_keeps_its_name(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, '<tool_call>{"name": "f", "arguments": [1]}</tool_call><|im_end|>')
    (call,) = renderer.parse_response(ids).failures
    assert (call.status, call.name, call.arguments) == (ToolCallStatus.INVALID_ARGUMENTS, "f", {})


def test_a_call_that_the_completion_ends_in_is_unclosed(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, 'so<tool_call>{"name": "f"')
    (call,) = renderer.parse_response(ids).tool_calls
    assert call.status is ToolCallStatus.UNCLOSED
    assert call.raw == '{"name": "f"'
    assert call.span == (len(ids_of(tokenizer, "so")), len(ids))


def test_a_call_that_another_one_opens_in_is_unclosed(renderer: TemplateRenderer, tokenizer: Any) -> None:
    parsed = renderer.parse_response(ids_of(tokenizer, f"<tool_call>oops{CALL}</tool_call>"))
    assert [call.status for call in parsed.tool_calls] == [ToolCallStatus.UNCLOSED, ToolCallStatus.OK]
    assert parsed.tool_calls[0].raw == "oops"
    assert parsed.content == "</tool_call>"


def test_a_call_inside_reasoning_that_was_not_closed_is_read(renderer: TemplateRenderer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, f"<think>maybe {CALL}<|im_end|>")
    parsed = renderer.parse_response(ids)
    (call,) = parsed.tool_calls
    assert (call.status, call.name, call.arguments) == (ToolCallStatus.OK, "add", {"a": 1})
    assert tokenizer.decode(ids[slice(*call.span)]) == CALL
    assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == ("maybe", "", True)


def test_reasoning_about_calls_that_is_closed_stays_reasoning(renderer: TemplateRenderer, tokenizer: Any) -> None:
    thought = "the tags <tool_call> and </tool_call> are around <tool_call>{"
    parsed = renderer.parse_response(ids_of(tokenizer, f"<think>{thought}</think>so {CALL}<|im_end|>"))
    assert (parsed.reasoning, parsed.content) == (thought, "so")
    assert [call.status for call in parsed.tool_calls] == [ToolCallStatus.OK]


@pytest.mark.parametrize("written", ["<tool_call>oops</tool_call>", '<tool_call>{"name": "f"'])
def test_a_call_that_stays_in_reasoning_without_an_end_is_counted(
    renderer: TemplateRenderer, tokenizer: Any, written: str
) -> None:
    ids = ids_of(tokenizer, f"<think>hm {written}<|im_end|>")
    parsed = renderer.parse_response(ids)
    (call,) = parsed.failures
    assert (call.status, call.raw, len(ids[slice(*call.span)])) == (ToolCallStatus.IN_REASONING, written, 0)
    assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == (f"hm {written}", "", False)


def test_a_call_whose_tags_are_ordinary_text_stays_in_reasoning_and_is_counted() -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = TemplateRenderer(tokenizer)
    (call,) = renderer.parse_response(ids_of(tokenizer, f"<think>hm {CALL}<|im_end|>")).tool_calls
    assert (call.status, call.raw) == (ToolCallStatus.IN_REASONING, CALL)
    assert renderer.parse_response(ids_of(tokenizer, f"<think>hm {CALL}</think>so<|im_end|>")).tool_calls == ()


def test_reasoning_after_a_call_is_text(renderer: TemplateRenderer, tokenizer: Any) -> None:
    parsed = renderer.parse_response(ids_of(tokenizer, f"{CALL}<think>hm</think>"))
    assert [call.status for call in parsed.tool_calls] == [ToolCallStatus.OK]
    assert (parsed.reasoning, parsed.content) == ("", "<think>hm</think>")


def test_the_prompt_may_have_opened_the_reasoning(tokenizer: Any) -> None:
    renderer = TemplateRenderer(tokenizer, template_kwargs={"open_thinking": True})
    prompt_ids = renderer.render([{"role": "user", "content": "hi"}]).token_ids
    completion_ids = ids_of(tokenizer, "hm</think>\n\nyes<|im_end|>")
    for parsed in (
        renderer.parse_response(completion_ids, prompt_ids=prompt_ids),
        renderer.parse_response(completion_ids),
    ):
        assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == ("hm", "yes", True)
    plain = TemplateRenderer(tokenizer).render([{"role": "user", "content": "hi"}]).token_ids
    assert renderer.parse_response(completion_ids, prompt_ids=plain).content == "hm</think>\n\nyes"


def test_the_users_own_think_tag_opens_nothing(renderer: TemplateRenderer, tokenizer: Any) -> None:
    prompt_ids = renderer.render([{"role": "user", "content": "what does <think> do?"}]).token_ids
    parsed = renderer.parse_response(ids_of(tokenizer, "It opens.<|im_end|>"), prompt_ids=prompt_ids)
    assert parsed.content == "It opens."
    assert parsed.reasoning_complete


def test_without_such_control_tokens_calls_are_found_by_their_text() -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = TemplateRenderer(tokenizer)
    ids = ids_of(tokenizer, f"<think>é 😀</think>Größe 😀 {CALL} ok<|im_end|>")
    parsed = renderer.parse_response(ids)
    (call,) = parsed.tool_calls
    assert (call.status, call.name) == (ToolCallStatus.OK, "add")
    assert CALL in tokenizer.decode(ids[slice(*call.span)])
    assert CALL not in tokenizer.decode(ids[call.span[0] + 1 : call.span[1]])
    assert CALL not in tokenizer.decode(ids[call.span[0] : call.span[1] - 1])
    assert parsed.reasoning == "é 😀"
    assert parsed.content == "Größe 😀\nok"


def test_a_message_with_the_parsed_calls_renders_to_what_was_sampled() -> None:
    tokenizer = make_tokenizer(QWEN)
    renderer = TemplateRenderer(tokenizer)
    question: Any = {"role": "user", "content": "1 + 1?"}
    ids = ids_of(tokenizer, f"Let me see.\n{CALL}<|im_end|>")
    message = renderer.parse_response(ids).to_message(["call00001"])
    prompt_ids = renderer.render([question]).token_ids
    assert renderer.render_ids([question, message]).tolist() == [*prompt_ids.tolist(), *ids, *ids_of(tokenizer, "\n")]


def test_nothing_at_all_is_an_empty_turn(renderer: TemplateRenderer) -> None:
    parsed = renderer.parse_response([])
    assert (parsed.content, parsed.tool_calls, parsed.reasoning_complete) == ("", (), True)
