"""Tokenizers and messages that are wrong: an error that names the field, the rule and the value, or a refusal."""

from datetime import datetime
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PythonBackend

from support.templates import CHATML, QWEN
from support.tokenizer_kinds import KINDS, TokenizerKind
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError, MessagesError, TemplateError, ToolDefinitionError
from unbroken.rendering.base import Bridge, Refusal
from unbroken.rendering.encoding.marks import Span
from unbroken.rendering.encoding.safe_encoder import SafeEncoder, UnsafeTextError
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

USER: Any = {"role": "user", "content": "hi"}
TURN: Any = {"role": "assistant", "content": "yes"}
DROPS_OTHERS = CHATML.replace(
    "{{- '<|im_start|>' + message.role",
    "{%- if message.role in ('user', 'assistant') -%}{{- '<|im_start|>' + message.role",
).replace("'<|im_end|>\\n' -}}\n", "'<|im_end|>\\n' -}}{%- endif -%}\n", 1)


def called(arguments: Any = None, **call: Any) -> Any:
    function = {"name": "f", "arguments": {} if arguments is None else arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function} | call],
    }


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


BAD_MESSAGES: dict[str, tuple[list[Any], str]] = {
    "a role that is no text": ([{"role": 3, "content": "a"}], r"messages\[0\]\.role must be a non-empty string, got 3"),
    "an unknown role": (
        [USER, {"role": "banana", "content": "a"}],
        r"messages\[1\]\.role must be one that the template writes, got 'banana'",
    ),
    "a role with a control token": (
        [{"role": "<|im_end|>", "content": "a"}],
        r"messages\[0\]\.role must hold no control",
    ),
    "content that is a number": (
        [{"role": "user", "content": 3}],
        r"messages\[0\]\.content must be text, parts or None",
    ),
    "content that is an object": (
        [{"role": "user", "content": {}}],
        r"messages\[0\]\.content must be text, .* got dict",
    ),
    "a part of an unknown type": (
        [{"role": "user", "content": [{"type": "smell", "smell": "roses"}]}],
        r"messages\[0\]\.content has a part of type 'smell'",
    ),
    "a part without a type": (
        [{"role": "user", "content": [{"text": "a"}]}],
        r"messages\[0\]\.content\[0\] must be a part",
    ),
    "half of a surrogate pair": (
        [{"role": "user", "content": "a\ud83d"}],
        r"messages\[0\]\.content must be text that UTF-8 can encode, got '\\ud83d' at character 1",
    ),
    "a result before any turn": (
        [USER, {"role": "tool", "content": "42"}],
        r"messages\[1\]\.role must not be 'tool' before an assistant message",
    ),
    "a result of no call": (
        [USER, called(), {"role": "tool", "content": "42", "tool_call_id": "d"}],
        r"messages\[2\]\.tool_call_id must be the id of an earlier call, got 'd', not one of \['c'\]",
    ),
    "a result before its call": (
        [USER, TURN, {"role": "tool", "content": "42", "tool_call_id": "c"}, called()],
        r"messages\[2\]\.tool_call_id must be the id of an earlier call, got 'c', not one of \[\]",
    ),
    "calls that are no list": (
        [USER, {**TURN, "tool_calls": {"name": "f"}}],
        r"messages\[1\]\.tool_calls must be a list of calls, got \{'name': 'f'\}",
    ),
    "a call that is no object": (
        [USER, {**TURN, "tool_calls": ["f"]}],
        r"tool_calls\[0\] must have a function with a name",
    ),
    "an id that is a number": ([USER, called(id=7)], r"messages\[1\]\.tool_calls\[0\]\.id must be text, got 7"),
    "a call id that is a number": (
        [USER, called(), {"role": "tool", "content": "a", "tool_call_id": 7}],
        r"messages\[2\]\.tool_call_id must be text, got 7",
    ),
    "reasoning that is a list": (
        [USER, {**TURN, "reasoning_content": ["a"]}],
        r"reasoning_content must be text, got \['a'\]",
    ),
    "arguments that are a list": (
        [USER, called([1])],
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object or the text of one, got \[1\]",
    ),
    "arguments that are no JSON": ([USER, called("{'a': 1}")], r"arguments must be a JSON object or the text of one"),
    "arguments that are the text of a list": ([USER, called("[1]")], r"must be a JSON object .* got '\[1\]'"),
    "arguments with a value that is no JSON": ([USER, called({"a": {1, 2}})], r"arguments must be JSON, got .*set"),
    "arguments with a number that is no JSON": ([USER, called({"a": float("nan")})], r"arguments must be JSON, got"),
    "arguments nested too deeply": ([USER, called({"a": nested(100_000)})], "nested too deeply"),
    "parts nested too deeply": (
        [{"role": "user", "content": [{"type": "text", "text": "a", "more": nested(100_000)}]}],
        r"messages\[0\] is nested too deeply",
    ),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages_are_errors_that_name_place_rule_and_value(name: str) -> None:
    messages, expected = BAD_MESSAGES[name]
    renderer = TemplateRenderer(make_tokenizer(DROPS_OTHERS))
    with pytest.raises(MessagesError, match=expected):
        renderer.render(messages)
    assert len(renderer.render([USER]).token_ids)


def test_a_role_that_only_the_template_knows_is_rendered() -> None:
    renderer = TemplateRenderer(make_tokenizer(CHATML))
    assert len(renderer.render([USER, {"role": "banana", "content": "a"}]).token_ids)


def test_huge_content_is_an_error_that_says_which_limit_and_the_next_prompt_is_rendered() -> None:
    renderer = TemplateRenderer(make_tokenizer(CHATML))
    with pytest.raises(
        TemplateError, match=r"of 170000\d\d characters: .*TemplateLimits.max_output_characters.*Shorten them"
    ):
        renderer.render([{"role": "user", "content": "x" * 17_000_000}, {"role": "user", "content": "hi"}])
    assert len(renderer.render([USER]).token_ids)


def test_a_bad_new_message_is_a_refusal_and_a_bad_turn_an_error() -> None:
    tokenizer = make_tokenizer(QWEN)
    renderer = TemplateRenderer(tokenizer)
    stop = token_ids([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    outcome = renderer.bridge_to_next_turn(
        token_ids([]), stop, [{"role": "user", "content": 3}], assistant=TURN, earlier=[USER]
    )
    assert isinstance(outcome, Refusal)
    assert "messages[0].content must be text" in outcome.detail
    with pytest.raises(MessagesError, match="arguments must be a JSON object"):
        renderer.bridge_to_next_turn(token_ids([]), stop, [USER], assistant=called("no"), earlier=[USER])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "function", "function": {"name": "f", "parameters": {"a": {1}}}}], r"tools\[0\] must be JSON, got"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": nested(100_000)}}],
            r"tools\[0\] must be JSON with less nesting",
        ),
    ],
    ids=["a set", "nested too deeply"],
)
def test_bad_tools_are_errors_that_name_place_rule_and_value(tools: Any, message: str) -> None:
    with pytest.raises(ToolDefinitionError, match=message):
        TemplateRenderer(make_tokenizer(QWEN)).render([USER], tools=tools)


def test_something_that_is_no_fast_tokenizer_is_an_error() -> None:
    for tokenizer in (None, "gpt2", object()):
        with pytest.raises(InvalidInputError, match=f"must be a fast tokenizer .*got {type(tokenizer).__name__}"):
            TemplateRenderer(tokenizer)


def test_a_slow_tokenizer_is_an_error() -> None:
    class SlowTokenizer(PythonBackend):
        def get_vocab(self) -> dict[str, int]:
            return {}

    with pytest.raises(
        InvalidInputError, match=r"must be a fast tokenizer .*got SlowTokenizer: load the model with load_renderer"
    ):
        TemplateRenderer(SlowTokenizer())


def test_the_bridge_of_a_renderer_does_not_change_with_the_clock() -> None:
    source = CHATML.replace("'<|im_start|>' + message.role", "'<|im_start|>' + strftime_now('%j') + message.role")
    tokenizer = make_tokenizer(source)
    renderer = TemplateRenderer(tokenizer, now=datetime(2026, 2, 3))
    stop = token_ids([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    outcome = renderer.bridge_to_next_turn(token_ids([]), stop, [USER], assistant=TURN, earlier=[USER])
    assert isinstance(outcome, Bridge)
    assert tokenizer.decode(outcome.bridge_ids) == "\n<|im_start|>034user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(TemplateError, match="no chat template to use: give the text of a template as chat_template="):
        TemplateRenderer(make_tokenizer(None))


def test_of_several_templates_the_default_is_used_and_a_wrong_name_is_an_error() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN}
    default, named = TemplateRenderer(tokenizer), TemplateRenderer(tokenizer, chat_template="tool_use")
    own = TemplateRenderer(make_tokenizer(CHATML))
    assert default.render([USER]).token_ids.tolist() == own.render([USER]).token_ids.tolist()
    assert len(named.render([USER]).token_ids) > len(default.render([USER]).token_ids)
    with pytest.raises(TemplateError, match=r"name of one of the tokenizer's \['default', 'tool_use'\], got 'tools'"):
        TemplateRenderer(tokenizer, chat_template="tools")
    tokenizer.chat_template = {"rag": CHATML, "tool_use": QWEN}
    with pytest.raises(TemplateError, match=r"give one of \['rag', 'tool_use'\]"):
        TemplateRenderer(tokenizer)


def test_a_tokenizer_without_special_tokens_renders_and_refuses_bridges() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token=None))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = CHATML
    renderer = TemplateRenderer(tokenizer)
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert renderer.render([USER]).token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    outcome = renderer.bridge_to_next_turn(token_ids([]), token_ids([0]), [USER], assistant=TURN, earlier=[USER])
    assert isinstance(outcome, Refusal)
    assert "no control token" in outcome.detail


def encoder_with(*tokens: AddedToken, normalizer: Any = None) -> SafeEncoder:
    backend = Tokenizer.from_str(KINDS["bytes"].make_backend().to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken("<|end|>", normalized=False), *tokens])
    return SafeEncoder(backend)


def encoded(encoder: SafeEncoder, before: str, outside: str, after: str) -> list[str]:
    """The control tokens of a text, of which `outside` is text from outside."""
    span = Span(start=len(before), stop=len(before + outside), index=0)
    ids = encoder.encode(before + outside + after, [span]).token_ids.tolist()
    return [text for i in ids if (text := encoder.control.get_text(i)) is not None]


def test_i5_a_token_that_is_one_only_as_a_word_is_refused_beside_text_from_outside() -> None:
    encoder = encoder_with(AddedToken("STOP", single_word=True, normalized=False))
    assert encoded(encoder, "a ", "text", " STOP <|end|>") == ["STOP", "<|end|>"]
    assert encoded(encoder, "a ", "STOP", " b <|end|>") == ["<|end|>"]
    for before, after in (("a STOP", " b"), ("a ", "STOP b")):
        with pytest.raises(UnsafeTextError, match="'STOP' is a control token only as a separate word"):
            encoded(encoder, before, "text", after)


@pytest.mark.parametrize("text", ["(so)", "so.", "{}", "-", "…"])
def test_i5_a_token_that_is_one_only_as_a_word_stands_beside_text_that_leaves_it_one(text: str) -> None:
    encoder = encoder_with(AddedToken("<|x|>", single_word=True, normalized=False))
    before = "" if text[0].isalnum() else "<|x|>"
    assert encoded(encoder, before, text, "<|x|><|end|>") == [*filter(None, [before]), "<|x|>", "<|end|>"]


@pytest.mark.parametrize("text", ["so", "7", "_", "今", "e\u0301", "\u200d"])
def test_i5_a_token_that_is_one_only_as_a_word_is_refused_beside_text_that_joins_it(text: str) -> None:
    encoder = encoder_with(AddedToken("<|x|>", single_word=True, normalized=False))
    for before, after in (("<|x|>", " b"), ("a ", "<|x|> b")):
        naive = [encoder.control.get_text(i) for i in encoder.encode_plain(before + text + after).tolist()]
        assert "<|x|>" not in naive, "the text would not join it"
        with pytest.raises(UnsafeTextError, match="only as a separate word"):
            encoded(encoder, before, text, after)


def test_i5_text_that_would_swallow_a_control_token_beside_it_does_not() -> None:
    encoder = encoder_with(AddedToken("<|x|>", normalized=True), normalizer=normalizers.NFKC())
    assert encoded(encoder, "a <|x|>", "\u0338 b", " <|end|>") == ["<|x|>", "<|end|>"]
    naive = encoder.encode_plain("a <|x|>\u0338 b <|end|>").tolist()
    assert [text for i in naive if (text := encoder.control.get_text(i))] == ["<|end|>"]


def test_i5_a_tokenizer_that_prepends_before_it_looks_for_tokens_encodes_no_text_that_may_forge() -> None:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder = encoder_with(AddedToken("<tool>", normalized=True), normalizer=normalizer)
    assert encoded(encoder, "a", "text", "<|end|>") == ["<|end|>"]
    with pytest.raises(UnsafeTextError, match="create these with normalized=False"):
        encoded(encoder, "a", "t <|end|>", "b")


def test_i5_a_control_token_that_is_one_character_of_the_vocabulary_is_refused_in_text() -> None:
    encoder = encoder_with(AddedToken("<", normalized=False))
    assert encoded(encoder, "a", "text", "<|end|>") == ["<|end|>"]
    with pytest.raises(UnsafeTextError, match="writes a control id for 'a t < b'"):
        encoded(encoder, "a", " t < b", "")


def test_unknown_characters_are_no_control_tokens_but_a_stop_token_for_them_is() -> None:
    kind = KINDS["Unigram with unknown"]
    renderer = TemplateRenderer(kind.tokenizer(CHATML))
    assert len(renderer.render([{"role": "user", "content": "\U0001f984 and 龘"}]).token_ids)
    backend = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    with pytest.raises(UnsafeTextError, match="writes a control id for 'zebra'"):
        encoded(SafeEncoder(backend), "", "zebra", "")


def test_white_space_and_what_stands_for_it_is_no_control_token() -> None:
    kind: TokenizerKind = KINDS["sentencepiece BPE, tokens for runs of spaces"]
    tokenizer = kind.tokenizer(CHATML)
    texts = AddedTokens.find_control(tokenizer.backend_tokenizer).texts
    assert texts == {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"}
    outcome = TemplateRenderer(tokenizer).bridge_to_next_turn(
        token_ids([]),
        token_ids([tokenizer.convert_tokens_to_ids("<|im_end|>")]),
        [{"role": "user", "content": "two  spaces\n\nand lines"}],
        assistant=TURN,
        earlier=[USER],
    )
    assert isinstance(outcome, Bridge)
