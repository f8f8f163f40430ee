"""Which parser a renderer has: found from the template, or named."""

from typing import Any

import numpy as np
import pytest

from support.format_templates import FORMAT_TEMPLATES
from support.templates import CHATML, QWEN, QWEN_THINKING
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.rendering.loader import load_renderer
from unbroken.rendering.parsing.formats import FORMATS, get_format
from unbroken.rendering.template import TemplateRenderer

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CODER_CALL = "<tool_call><function=f></function></tool_call>"
HEADERS = CHATML.replace("<|im_start|>", "<|start|>")


def write_calls(template: str, call: str) -> str:
    """The template with this expression for a call."""
    start = template.index("'<tool_call>\\n{")
    stop = template.index(" -}}\n    {%- endfor -%}", start)
    return template[:start] + call + template[stop:]


def parser_of(template: str, **options: Any) -> str:
    return TemplateRenderer(make_tokenizer(template), **options).parser_name


@pytest.mark.parametrize("template", [QWEN, QWEN_THINKING])
def test_the_format_of_a_call_that_the_template_renders_is_taken(template: str) -> None:
    assert parser_of(template) == "hermes"
    coder = write_calls(
        template,
        """'<tool_call>\\n<function=' + call.function.name + '>\\n' -}}"""
        """{%- for k, v in call.function.arguments | items -%}"""
        """{{- '<parameter=' + k + '>\\n' -}}{{- v if v is string else v | tojson -}}{{- '\\n</parameter>\\n' -}}"""
        """{%- endfor -%}{{- '</function>\\n</tool_call>'""",
    )
    assert parser_of(coder) == "qwen3_coder"


ENDS = [("", ""), ("\\n", "\\n"), ("\\n", ""), (" ", " "), ("\\n  ", "\\n")]


def write_tagged_call(before: str, after: str) -> str:
    """A call in Qwen3-Coder's tags, with these escaped texts around each value."""
    return (
        "'<tool_call>\\n<function=' + call.function.name + '>\\n' -}}"
        "{%- for k, v in call.function.arguments | items -%}"
        f"{{{{- '<parameter=' + k + '>{before}' -}}}}{{{{- v if v is string else v | tojson -}}}}"
        f"{{{{- '{after}</parameter>\\n' -}}}}{{%- endfor -%}}{{{{- '</function>\\n</tool_call>'"
    )


@pytest.mark.parametrize("name", [None, "qwen3_coder"])
@pytest.mark.parametrize(("before", "after"), ENDS)
def test_white_space_around_values_is_that_of_the_template_and_the_rest_is_the_value_s(
    before: str, after: str, name: str | None
) -> None:
    tokenizer = make_tokenizer(write_calls(QWEN, write_tagged_call(before, after)))
    renderer = TemplateRenderer(tokenizer, parser=name)
    assert (renderer.parser_name, renderer.unread_calls) == ("qwen3_coder", "")
    for value in ("x", "\nline\n", " x ", "\n", "", "\n\n  two\n\n"):
        call: Any = {"id": "callA0001", "type": "function", "function": {"name": "f", "arguments": {"a": value}}}
        turn: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
        rendered = renderer.render_text([{"role": "user", "content": "hi"}, turn])
        completion = rendered[rendered.rindex("<tool_call>") :].removesuffix("\n")
        (read,) = renderer.parse_response(np.array(tokenizer.encode(completion), dtype=np.int32)).tool_calls
        assert read.arguments == {"a": value}


def test_a_named_format_that_is_not_the_template_s_keeps_its_white_space() -> None:
    tokenizer = make_tokenizer(QWEN)
    renderer = TemplateRenderer(tokenizer, parser="qwen3_coder")
    completion = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call><|im_end|>"
    (read,) = renderer.parse_response(np.array(tokenizer.encode(completion), dtype=np.int32)).tool_calls
    assert read.arguments == {"a": "x"}


def test_a_prompt_that_the_history_does_not_repeat_is_no_part_of_the_call() -> None:
    template = FORMAT_TEMPLATES["nemotron"]
    prompt = "{{- '<|assistant|>' if add_generation_prompt -}}"
    assert prompt in template
    assert parser_of(template.replace(prompt, prompt.replace("<|assistant|>", "<|assistant|><think>"))) == "nemotron"
    assert parser_of(template.replace(prompt, prompt.replace("<|assistant|>", "<|assistant|><THINK>"))) == "nemotron"


def test_a_format_that_does_not_read_back_what_the_template_writes_is_not_taken() -> None:
    as_list = write_calls(QWEN, """'<tool_call>\\n' -}}{{- [call.function] | tojson -}}{{- '\\n</tool_call>'""")
    assert parser_of(as_list) == "none"
    by_position = write_calls(
        QWEN,
        """'<tool_call>\\n<function=' + call.function.name + '>' -}}{{- call.function.arguments.values() """
        """| list | tojson -}}{{- '</function></tool_call>'""",
    )
    assert parser_of(by_position) == "none"


def test_a_template_that_renders_no_calls_is_known_by_what_it_says() -> None:
    says = "{{- 'Call like <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>.' -}}"
    assert parser_of(says + HEADERS) == "glm"
    assert parser_of(says + CHATML) == "glm"


def test_a_template_that_shows_no_format_gets_no_calls_unless_it_is_chatml() -> None:
    assert parser_of(CHATML) == "hermes"
    assert parser_of(HEADERS) == "none"


def test_a_call_in_a_form_that_is_not_known_is_not_taken_for_another_one() -> None:
    own = QWEN.replace("<tool_call>", "<do>").replace("</tool_call>", "</do>")
    assert parser_of(own) == "none"


def test_a_rendered_call_outweighs_what_the_template_says() -> None:
    own = QWEN.replace("'<tool_call>\\n{", "'<do>\\n{").replace("}\\n</tool_call>'", "}\\n</do>'")
    assert own.count("</tool_call>") == 1, "the instruction still names the other form"
    assert parser_of(own) == "none"


ASKS_FOR_PYTHON = "{{- 'Answer in the form [func_name1(key=value), func_name2()].' -}}"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("v | string", id="without quotes"),
        pytest.param("v | string ~ 'r'", id="not even values"),
        pytest.param("""'"' ~ (v | string) ~ '"'""", id="all of them strings"),
    ],
)
def test_calls_that_cannot_be_read_back_are_read_in_the_form_that_the_template_asks_for_and_it_is_said(
    value: str,
) -> None:
    written = FORMAT_TEMPLATES["pythonic"].replace("(v | tojson)", f"({value})")
    renderer = TemplateRenderer(make_tokenizer(ASKS_FOR_PYTHON + written))
    assert renderer.parser_name == "pythonic"
    assert "[probe_one(text=" in renderer.unread_calls
    assert "'pythonic', which the template describes" in renderer.unread_calls


def test_calls_that_no_format_reads_back_are_said() -> None:
    renderer = TemplateRenderer(make_tokenizer(QWEN.replace("tool_call>", "do>")))
    assert renderer.parser_name == "none"
    assert "a model's calls are part of its text" in renderer.unread_calls
    assert renderer.unread_calls.count("<do>") == 1, "the form of one call"


def test_calls_that_no_format_reads_back_are_logged_when_the_renderer_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_renderer(make_tokenizer(QWEN))
    assert not caplog.messages
    renderer = load_renderer(make_tokenizer(QWEN.replace("tool_call>", "do>")))
    assert caplog.messages == [renderer.unread_calls]


@pytest.mark.parametrize("template", [QWEN, CHATML, HEADERS, ASKS_FOR_PYTHON + FORMAT_TEMPLATES["pythonic"]])
def test_nothing_is_said_of_calls_that_are_read_back_or_not_rendered(template: str) -> None:
    assert TemplateRenderer(make_tokenizer(template)).unread_calls == ""


def test_what_a_template_asks_for_counts_only_if_the_names_of_its_calls_are_found_by_it() -> None:
    asks = "{{- 'Write <tool_call> and </tool_call>.' -}}" + FORMAT_TEMPLATES["pythonic"]
    assert parser_of(asks.replace("(v | tojson)", "(v | string)")) == "none"


def test_without_a_format_calls_are_content() -> None:
    tokenizer = make_tokenizer(HEADERS)
    parsed = TemplateRenderer(tokenizer).parse_response(tokenizer.encode(f"<think>hm</think>so {CALL}"))
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("hm", f"so {CALL}", ())


def test_a_parser_can_be_named() -> None:
    tokenizer = make_tokenizer(QWEN)
    renderer = TemplateRenderer(tokenizer, parser="qwen3_coder")
    assert renderer.parser_name == "qwen3_coder"
    assert [call.name for call in renderer.parse_response(tokenizer.encode(CODER_CALL)).tool_calls] == ["f"]


def test_an_unknown_parser_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"'hermes'.*'none'.*got 'hermus'"):
        TemplateRenderer(make_tokenizer(QWEN), parser="hermus")


def test_every_format_has_its_own_name() -> None:
    assert len({form.name for form in FORMATS}) == len(FORMATS)
    assert all(get_format(form.name) is form for form in FORMATS)


def test_the_delimiters_of_reasoning_are_the_template_s() -> None:
    tokenizer = make_tokenizer(
        QWEN_THINKING.replace("think>", "reasoning>"), control_tokens=("<reasoning>", "</reasoning>")
    )
    renderer = TemplateRenderer(tokenizer)
    parsed = renderer.parse_response(tokenizer.encode(f"<reasoning>hm</reasoning>so{CALL}"))
    assert (parsed.reasoning, parsed.content) == ("hm", "so")
    assert len(parsed.tool_calls) == 1


def test_a_completion_can_be_read_while_it_is_sampled() -> None:
    tokenizer = make_tokenizer(QWEN_THINKING)
    renderer = TemplateRenderer(tokenizer, template_kwargs={"open_thinking": True})
    prompt_ids = renderer.render([{"role": "user", "content": "hi"}]).token_ids
    ids = tokenizer.encode(f"hm</think>so{CALL}<|im_end|>")
    reader = renderer.open_response(prompt_ids=prompt_ids)
    deltas = [delta for token_id in ids for delta in reader.feed([token_id])]
    assert [delta.text or delta.tool_call.name for delta in deltas] == [*"hm", *"so", "f"]
    assert reader.finish() == renderer.parse_response(ids, prompt_ids=prompt_ids)
