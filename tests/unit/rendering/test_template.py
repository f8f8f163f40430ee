"""TemplateRenderer: prompts, stops, closings, refusals, and what it says to bad input."""

from typing import Any

import numpy as np
import pytest
import transformers
from packaging.version import Version

from support import templates
from support.conversations import FAMILIES
from support.corpus import corpus_template
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError, MessagesError, TemplateError
from unbroken.rendering import prompt
from unbroken.rendering.base import TEMPLATE, Bridge, Closing, Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer

USER: Any = {"role": "user", "content": "hi there"}
TURN: Any = {"role": "assistant", "content": "yes"}
CALL: Any = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL_TURN: Any = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER: Any = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "forty-two"}


def family(name: str, **options: Any) -> tuple[TemplateRenderer, Any]:
    tokenizer = FAMILIES[name].tokenizer()
    return TemplateRenderer(tokenizer, **options), tokenizer


def bridge(renderer: TemplateRenderer, tokenizer: Any, completion: str, new: list[Any], turn: Any = TURN) -> Any:
    prompt_ids = renderer.render([USER]).token_ids
    completion_ids = np.array(tokenizer.encode(completion, add_special_tokens=False), dtype=np.int32)
    return renderer.bridge_to_next_turn(prompt_ids, completion_ids, new, assistant=turn, earlier=[USER])


def text_of_bridge(tokenizer: Any, outcome: Any) -> str:
    assert isinstance(outcome, Bridge), outcome
    return tokenizer.decode(outcome.bridge_ids.tolist())


# What an id spells


def test_ids_of_a_prompt_name_the_message_they_spell() -> None:
    renderer, tokenizer = family("qwen")
    messages: list[Any] = [{"role": "system", "content": "Be brief, user."}, USER, CALL_TURN, ANSWER]
    rendered = renderer.render(messages)
    spelled = {
        k: tokenizer.decode(rendered.token_ids[rendered.message_indices == k].tolist()) for k in (0, 1, 3, TEMPLATE)
    }
    assert (spelled[0], spelled[1], spelled[3]) == ("Be brief, user.", "hi there", "forty-two")
    assert spelled[TEMPLATE].startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>")


def test_ids_of_a_bridge_name_the_new_message_they_spell() -> None:
    renderer, tokenizer = family("qwen")
    user: Any = {"role": "user", "content": "user"}
    outcome = bridge(renderer, tokenizer, "x<|im_end|>", [ANSWER, user], CALL_TURN)
    for k, text in ((0, "forty-two"), (1, "user")):
        assert tokenizer.decode(outcome.bridge_ids[outcome.message_indices == k].tolist()) == text
    assert np.flatnonzero(outcome.message_indices == 1)[0] > np.flatnonzero(outcome.bridge_ids >= 0)[0] + 5


def test_render_ids_leaves_the_generation_prompt_to_the_caller() -> None:
    renderer, tokenizer = family("qwen")
    without = renderer.render_ids([USER])
    assert without.tolist() == tokenizer.apply_chat_template([USER])["input_ids"]
    with_prompt = renderer.render_ids([USER], add_generation_prompt=True)
    assert with_prompt.tolist() == renderer.render([USER]).token_ids.tolist()
    assert len(with_prompt) > len(without)


# Stops


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("chatml", {"<|im_end|>"}),
        ("llama", {"<|eot_id|>"}),
        ("glm", {"<|user|>", "<|observation|>", "<|system|>"}),
        ("two_token_close", {"<|end_sampling|>"}),
        ("stand_in", {"<|return|>", "<|call|>"}),
    ],
)
def test_the_stop_ids_are_those_the_template_shows_and_the_end_of_text(name: str, stops: set[str]) -> None:
    renderer, tokenizer = family(name)
    assert {tokenizer.decode([i]) for i in renderer.get_stop_token_ids()} == stops | {"<|endoftext|>"}


def test_given_stop_ids_are_added() -> None:
    renderer, _ = family("chatml", stop_token_ids=[7])
    assert 7 in renderer.get_stop_token_ids()


# Closings (I7)


def test_i7_a_turn_cut_by_length_is_closed() -> None:
    renderer, tokenizer = family("chatml")
    outcome = bridge(renderer, tokenizer, "yes, becau", [USER])
    assert outcome.closing is Closing.TRUNCATED
    assert text_of_bridge(tokenizer, outcome) == (
        "<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_i7_open_reasoning_is_closed_before_the_turn() -> None:
    renderer, tokenizer = family("qwen_thinking")
    outcome = bridge(renderer, tokenizer, "<think>\nwell, it", [USER])
    assert outcome.closing is Closing.REASONING
    assert text_of_bridge(tokenizer, outcome).startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\nhi there")
    outcome = bridge(renderer, tokenizer, "<think>\nwell\n</think>\n\nyes, bec", [USER])
    assert outcome.closing is Closing.TRUNCATED


def test_i7_reasoning_that_the_prompt_opened_is_closed_too() -> None:
    renderer, tokenizer = family("qwen_thinking", template_kwargs={"open_thinking": True})
    assert bridge(renderer, tokenizer, "well, it", [USER]).closing is Closing.REASONING
    assert bridge(renderer, tokenizer, "well\n</think>\n\nyes, bec", [USER]).closing is Closing.TRUNCATED


def test_i7_a_stop_id_that_is_not_the_templates_is_followed_by_the_templates_end() -> None:
    renderer, tokenizer = family("chatml")
    outcome = bridge(renderer, tokenizer, "yes<|endoftext|>", [USER])
    assert outcome.closing is Closing.FOREIGN_STOP
    assert text_of_bridge(tokenizer, outcome).startswith("<|im_end|>\n<|im_start|>user\n")


def test_i7_a_turn_ended_by_a_stop_string_is_closed_after_it() -> None:
    renderer, tokenizer = family("llama")
    outcome = bridge(renderer, tokenizer, "yes STOP", [USER])
    assert outcome.closing is Closing.TRUNCATED
    assert text_of_bridge(tokenizer, outcome).startswith("<|eot_id|><|start_header_id|>user")


def test_i7_of_a_close_of_two_tokens_the_missing_ones_are_given() -> None:
    renderer, tokenizer = family("two_token_close")
    rest = "<|message|>user<|content|>hi there<|end_message|><|message|>assistant<|content|>"
    for completion, given in (
        ("yes", "<|end_message|><|end_sampling|>"),
        ("yes<|end_message|>", "<|end_sampling|>"),
        ("yes<|end_message|><|end_sampling|>", ""),
    ):
        assert text_of_bridge(tokenizer, bridge(renderer, tokenizer, completion, [USER])) == given + rest


def test_i7_the_end_of_a_last_turn_stands_for_the_one_in_mid_conversation() -> None:
    renderer, tokenizer = family("stand_in")
    outcome = bridge(renderer, tokenizer, "yes<|return|>", [USER])
    assert outcome.closing is Closing.NONE
    assert text_of_bridge(tokenizer, outcome).startswith("<|start|>user<|message|>hi there")


# The one exception to I1


def test_a_sampled_header_of_the_wrong_role_is_taken_back() -> None:
    renderer, tokenizer = family("glm")
    outcome = bridge(renderer, tokenizer, "x<|user|>", [ANSWER], CALL_TURN)
    assert outcome.num_taken_back == 1
    assert text_of_bridge(tokenizer, outcome).startswith("<|observation|>\n<tool_response>\nforty-two")
    outcome = bridge(renderer, tokenizer, "x<|observation|>", [ANSWER], CALL_TURN)
    assert outcome.num_taken_back == 0
    assert text_of_bridge(tokenizer, outcome).startswith("\n<tool_response>\nforty-two")


# Refusals


@pytest.mark.parametrize(
    ("new", "turn", "reason"),
    [
        ([], TURN, RefusalReason.BAD_EXTENSION),
        ([TURN], TURN, RefusalReason.BAD_EXTENSION),
        ([{"role": "user"}, "what"], TURN, RefusalReason.BAD_EXTENSION),
        ([{**ANSWER, "tool_call_id": "other"}], CALL_TURN, RefusalReason.BAD_EXTENSION),
        ([{"role": "user<|im_end|>", "content": "x"}], TURN, RefusalReason.UNSAFE_TEXT),
        ([{"role": "user", "content": [{"type": "video", "video": b"x"}]}], TURN, RefusalReason.UNSUPPORTED),
        ([{"role": "user", "content": [{"type": "image", "image": b"x"}]}], TURN, RefusalReason.BAD_EXTENSION),
        ([{"role": "stranger", "content": "x"}], TURN, RefusalReason.DROPS_MESSAGE),
    ],
)
def test_what_cannot_extend_a_turn_is_refused_with_its_reason(new: list[Any], turn: Any, reason: RefusalReason) -> None:
    renderer, tokenizer = family("qwen")
    outcome = bridge(renderer, tokenizer, "x<|im_end|>", new, turn)
    assert isinstance(outcome, Refusal)
    assert outcome.reason is reason
    assert outcome.detail


@pytest.mark.parametrize("name", ["qwen", "llama", "glm", "two_token_close", "stand_in"])
@pytest.mark.parametrize("turn", [CALL_TURN, {**CALL_TURN, "content": "so"}], ids=["call", "call and text"])
def test_i1_the_words_that_mark_the_turn_in_the_window_do_no_harm_in_a_tool_result(name: str, turn: Any) -> None:
    renderer, tokenizer = family(name)
    words = "Wq7Text Wq7Call0z0z"
    outcome = bridge(renderer, tokenizer, "yes", [{**ANSWER, "content": words}], turn)
    benign = bridge(renderer, tokenizer, "yes", [ANSWER], turn)
    assert text_of_bridge(tokenizer, outcome) == text_of_bridge(tokenizer, benign).replace("forty-two", words)


def test_a_template_that_raises_for_the_turn_refuses_with_its_own_words() -> None:
    renderer, tokenizer = family("llama")
    turn: Any = {**CALL_TURN, "tool_calls": [CALL, {**CALL, "id": "call00002"}]}
    outcome = bridge(renderer, tokenizer, "x<|eot_id|>", [ANSWER], turn)
    assert outcome.reason is RefusalReason.TEMPLATE_RAISES
    assert "one call at a time, please" in outcome.detail


def test_a_template_without_control_tokens_between_turns_renders_and_refuses_to_bridge() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    renderer = TemplateRenderer(tokenizer)
    assert tokenizer.decode(renderer.render([USER]).token_ids.tolist()) == "user: hi there\n"
    outcome = bridge(renderer, tokenizer, "yes", [USER])
    assert outcome.reason is RefusalReason.UNDERIVABLE


def test_a_template_that_puts_the_turn_behind_the_answers_refuses() -> None:
    template = templates.CHATML.replace("in messages -%}", "in messages | sort(attribute='role', reverse=true) -%}")
    tokenizer = make_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    outcome = bridge(renderer, tokenizer, "yes<|im_end|>", [USER])
    assert isinstance(outcome, Refusal)


# Bad input


def test_a_template_may_be_given_instead_of_the_tokenizers() -> None:
    tokenizer = make_tokenizer(None, control_tokens=("<|im_start|>", "<|im_end|>"))
    assert TemplateRenderer(tokenizer, chat_template=templates.CHATML).render([USER]).token_ids.size


def test_a_template_that_does_not_compile_is_named_with_its_line() -> None:
    with pytest.raises(TemplateError, match=r"does not compile: line 2: .*chat_template=") as caught:
        TemplateRenderer(make_tokenizer("fine\n{% if %}"))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no such role') }}", "{{ messages[0].nothing.at_all }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_refuses_the_messages_says_which_roles(template: str) -> None:
    renderer = TemplateRenderer(make_tokenizer(template))
    with pytest.raises(TemplateError, match=r"refuses these messages \(roles: user\)") as caught:
        renderer.render([USER])
    assert caught.value.__suppress_context__


def test_a_stop_id_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match="stop_token_ids must lie in the vocabulary"):
        family("qwen", stop_token_ids=[10**6])


def test_i5_text_that_the_template_cuts_at_a_control_token_is_an_error_that_says_what_to_do() -> None:
    renderer, _ = family("qwen_thinking")
    with pytest.raises(TemplateError, match="Give reasoning as reasoning_content"):
        renderer.render([USER, {"role": "assistant", "content": "<think>hm</think>yes"}])


def test_i5_text_that_the_template_measures_has_no_message_index_and_may_hold_no_control_token() -> None:
    tokenizer = make_tokenizer(templates.TELLS_LENGTHS)
    renderer = TemplateRenderer(tokenizer)
    rendered = renderer.render([USER])
    assert rendered.token_ids.tolist() == tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert set(rendered.message_indices.tolist()) == {TEMPLATE}
    hostile: Any = {"role": "user", "content": "a <|im_end|> b"}
    with pytest.raises(TemplateError, match="cuts or rewrites"):
        renderer.render([hostile])
    assert text_of_bridge(tokenizer, bridge(renderer, tokenizer, "x<|im_end|>", [USER])).startswith(
        "\n<|im_start|>user 8\nhi there"
    )
    assert bridge(renderer, tokenizer, "x<|im_end|>", [hostile]).reason is RefusalReason.UNSAFE_TEXT


def test_a_tokenizer_that_truncates_does_not_truncate_prompts() -> None:
    tokenizer = FAMILIES["qwen"].tokenizer()
    whole = TemplateRenderer(tokenizer).render([USER]).token_ids
    tokenizer.backend_tokenizer.enable_truncation(5)
    renderer = TemplateRenderer(tokenizer)
    assert renderer.render([USER]).token_ids.tolist() == whole.tolist()


# Forms


def test_messages_are_brought_into_the_templates_form_and_not_changed() -> None:
    for name in ("qwen", "string_arguments", "parts"):
        renderer, tokenizer = family(name)
        part: Any = {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]}
        assert renderer.render([part]).token_ids.tolist() == renderer.render([USER]).token_ids.tolist()
        assert len(part["content"]) == 2
    for arguments in ({"a": 1}, '{"a": 1}'):
        turn: Any = {**CALL_TURN, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}]}
        for name in ("qwen", "string_arguments"):
            renderer, tokenizer = family(name)
            text = tokenizer.decode(renderer.render_ids([USER, turn]).tolist())
            assert '{"name": "add", "arguments": {"a": 1}}' in text


def test_no_content_is_rendered_as_no_text() -> None:
    renderer, tokenizer = family("chatml")
    assert "None" not in tokenizer.decode(renderer.render([{"role": "user", "content": None}]).token_ids.tolist())


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("name", ["trl/qwen3", "trl/gptoss", "trl/gemma4", "trl/glm4moe", "trl/llama3_1"])
def test_reasoning_is_rendered_under_each_of_its_names(name: str, key: str) -> None:
    tokenizer = corpus_template(name).tokenizer()
    renderer = TemplateRenderer(tokenizer)
    messages: list[Any] = [USER, {**CALL_TURN, key: "well then"}, ANSWER]
    rendered = renderer.render(messages)
    assert ("well then" in tokenizer.decode(rendered.token_ids.tolist())) == (name != "trl/llama3_1")
    expected = renderer.render([USER, {**CALL_TURN, "reasoning_content": "well then"}, ANSWER])
    assert rendered.token_ids.tolist() == expected.token_ids.tolist()
    if Version(transformers.__version__) >= Version("5.23"):  # transformers' own renderings agree with each other too
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(rendered.token_ids.tolist()) == text


@pytest.mark.parametrize(
    ("reasoning", "shown"),
    [
        ({"reasoning": "b", "thinking": "a", "reasoning_content": None}, "a"),
        ({"reasoning": "b", "reasoning_content": "a"}, "a"),
    ],
)
def test_of_several_texts_of_reasoning_the_one_that_transformers_takes_is_rendered(
    reasoning: dict[str, str | None], shown: str
) -> None:
    renderer = TemplateRenderer(corpus_template("trl/qwen3").tokenizer())
    found, expected = (
        renderer.render([USER, {**CALL_TURN, **given}, ANSWER]) for given in (reasoning, {"reasoning_content": shown})
    )
    assert found.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_is_no_text_is_refused(key: str) -> None:
    renderer, _ = family("chatml")
    with pytest.raises(MessagesError, match=rf"messages\[1\]\.{key} must be text, got"):
        renderer.render([USER, {**TURN, key: [{"text": "well"}]}])


@pytest.mark.parametrize("name", ["trl/qwen3", "trl/llama3_1", "trl/gptoss", "trl/glm4moe", "trl/deepseekv3"])
def test_a_key_that_is_none_is_a_key_that_is_missing(name):
    renderer = TemplateRenderer(corpus_template(name).tokenizer())
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    empty = {"name": None, "tool_calls": None, "tool_call_id": None, "reasoning_content": None, "thinking": None}
    with_empty: Any = [{**message, **empty} for message in messages]
    expected = renderer.render([*messages, messages[0]])
    assert renderer.render([*with_empty, with_empty[0]]).token_ids.tolist() == expected.token_ids.tolist()
    stop = expected.token_ids[:0]
    bridges = [
        renderer.bridge_to_next_turn(stop, stop, [given[0]], assistant=given[1], earlier=[given[0]])
        for given in (messages, with_empty)
    ]
    assert [bridge.bridge_ids.tolist() for bridge in bridges] == [bridges[0].bridge_ids.tolist()] * 2


def test_short_conversations_are_forgotten_by_what_they_take_and_not_by_their_texts(monkeypatch):
    """One of a few characters takes a kilobyte: those of a long run would take the memory of many."""
    monkeypatch.setattr(prompt, "_MAX_CHARACTERS", 20_000)
    recent = prompt.RecentPrompts()
    conversations = [[{"role": "user", "content": f"{number}"}] for number in range(100)]
    for messages in conversations:
        recent.add(messages, [], "x", converted=messages)
    assert recent.find(conversations[-1], []) is not None
    assert sum(recent.find(messages, []) is not None for messages in conversations) < 50


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.True_, np.uint8(1)),
        (np.array([1, 2]), np.array([[1], [2]])),
        (1, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_a_prompt_is_not_that_of_values_of_another_type_shape_or_order(first, second):
    renderer, tokenizer = family(
        "qwen", chat_template="{% for m in messages %}{{ m.content }}{{ m.score }}{% endfor %}"
    )
    for score in (first, second):
        ids = renderer.render_ids([{**USER, "score": score}], add_generation_prompt=True)
        assert tokenizer.decode(ids.tolist()) == f"hi there{score}"


def test_a_prompt_is_remembered_as_it_was_when_its_caller_changes_the_arguments_of_a_call():
    def play(renderer: TemplateRenderer, earlier: list[Any]) -> Any:
        prompt_ids = renderer.render(earlier).token_ids
        return renderer.bridge_to_next_turn(prompt_ids, prompt_ids[:1], [USER], assistant=TURN, earlier=earlier)

    arguments = {"a": 1}
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    earlier: list[Any] = [USER, {**CALL_TURN, "tool_calls": [call]}, ANSWER]
    renderer, _ = family("qwen")
    renderer.render(earlier)
    arguments["a"] = 1000
    again = [USER, CALL_TURN, ANSWER]
    assert play(renderer, again).history is play(family("qwen")[0], again).history


def test_a_prompt_that_several_rollouts_ask_for_is_rendered_once_until_a_message_changes(monkeypatch):
    renderer, _ = family("qwen")
    messages: list[Any] = [{"role": "user", "content": "hi there"}]
    first = renderer.render(messages)
    renderings: list[Any] = []
    render = renderer._template.render
    monkeypatch.setattr(
        renderer._template, "render", lambda *given, **more: renderings.append(1) or render(*given, **more)
    )
    again = renderer.render([{"role": "user", "content": "hi there"}])
    assert not renderings
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert not again.token_ids.flags.writeable
    assert not again.message_indices.flags.writeable
    messages[0]["content"] = "hi"
    changed = renderer.render(messages)
    fresh, _ = family("qwen")
    assert changed.token_ids.tolist() == fresh.render(messages).token_ids.tolist() != first.token_ids.tolist()
