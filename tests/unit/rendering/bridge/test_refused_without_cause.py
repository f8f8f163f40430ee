"""I1 where a sentinel or a mark changes what the template writes, though the bridge is exact: no cause to refuse."""

from typing import Any

import pytest

from support.templates import GLM, GLM_CONTROL_TOKENS, chatml_with
from support.tokenizers import make_tokenizer
from unbroken.rendering.base import Bridge, Closing, Refusal
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

QUESTION: Any = {"role": "user", "content": "Which files are there?"}
NEXT: Any = {"role": "user", "content": "And where?"}
CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end|>", "<|stop|>")


def call(number: int, arguments: dict[str, Any] | str, name: str = "list") -> Any:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content: str = "", *calls: Any, reasoning: str = "") -> Any:
    message: Any = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def result(number: int, content: Any = None, name: str = "list") -> Any:
    content = content or f"result {number}"
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}", "name": name}


def bridge_after(
    template: str,
    history: list[Any],
    last: Any,
    new: list[Any],
    *,
    sampled: str = "",
    stop: str = "<|end|>",
    control_tokens: Any = CONTROL,
    **options: Any,
) -> tuple[str, Any, TemplateRenderer, Any]:
    """The whole text, and the bridge after a turn that was `sampled`."""
    tokenizer = make_tokenizer(template, control_tokens=control_tokens)
    renderer = TemplateRenderer(tokenizer, **options)
    text = renderer.render_text([*history, last, *new], add_generation_prompt=True)
    completion_ids = token_ids(tokenizer((sampled or "x") + stop, add_special_tokens=False)["input_ids"])
    prompt = renderer.render(history).token_ids
    outcome = renderer.bridge_to_next_turn(prompt, completion_ids, new, assistant=last, earlier=history)
    return text, outcome, renderer, tokenizer


def check_exact(text: str, outcome: Any, tokenizer: Any, after: str) -> None:
    """The bridge is the text from the end of `after` on, which stands in the text once."""
    assert isinstance(outcome, Bridge), outcome
    _, found, rest = text.partition(after)
    assert found
    assert after not in rest
    assert tokenizer.decode(outcome.bridge_ids.tolist()) == rest


# --- results in another order than the calls

SORTS_RESULTS = """\
{%- set ns = namespace(calls=[]) -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}
      {%- set rest = messages[loop.index0:] -%}
      {%- for call in ns.calls -%}{%- for m in rest if m.role == 'tool' and m.tool_call_id == call.id -%}
        {{- '<|open|>result<|sep|>' + m.content + '<|end|>' -}}
      {%- endfor -%}{%- endfor -%}
    {%- endif -%}
  {%- else -%}
    {%- set ns.calls = message.tool_calls or [] -%}
    {{- '<|open|>' + message.role + '<|sep|>' + message.content -}}
    {%- for call in ns.calls -%}{{- '\n' + call.function.name + ' ' + call.function.arguments | tojson -}}{%- endfor -%}
    {{- '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|open|>assistant<|sep|>' -}}{%- endif -%}
"""
CUTS_RESULTS = SORTS_RESULTS.replace("m.content +", "m.content[:400] | replace('o', '0') +")
THREE_CALLS = turn("", *(call(k, {"x": k}) for k in (1, 2, 3)))


@pytest.mark.parametrize("template", [SORTS_RESULTS, CUTS_RESULTS], ids=["marked", "rewritten"])
def test_i1_results_that_the_template_sorts_as_the_calls_are_bridged(template: str) -> None:
    new = [result(3), result(1), result(2)]
    text, outcome, _, tokenizer = bridge_after(template, [QUESTION], THREE_CALLS, new)
    check_exact(text, outcome, tokenizer, 'list {"x": 3}<|end|>')
    if template is SORTS_RESULTS:
        indices = [int(index) for index in outcome.message_indices if index >= 0]
        assert list(dict.fromkeys(indices)) == [1, 2, 0]


@pytest.mark.parametrize("template", [SORTS_RESULTS, CUTS_RESULTS], ids=["marked", "rewritten"])
def test_i1_a_result_that_a_template_which_sorts_leaves_out_or_repeats_is_refused(template: str) -> None:
    without_id = {"role": "tool", "content": "result 3"}
    for new in ([result(2), result(1), without_id], [result(2), NEXT, result(1)]):
        _, outcome, _, _ = bridge_after(template, [QUESTION], THREE_CALLS, new)
        assert isinstance(outcome, Refusal), outcome


# --- a call without arguments, and reasoning alone

TAGS = """\
{%- for message in messages -%}
  {{- '<|open|>' + message.role -}}
  {%- if message.role == 'tool' -%}
    {%- for other in messages -%}{%- for call in other.tool_calls or [] if call.id == message.tool_call_id -%}
      {{- ' of ' + call.function.name -}}
    {%- endfor -%}{%- endfor -%}
  {%- endif -%}
  {{- '<|sep|>' -}}
  {%- if message.reasoning_content -%}
    {{- 'thinking<|sep|>' + message.reasoning_content + '<|close|>' -}}
    {%- if message.content -%}{{- 'text<|sep|>' -}}{%- endif -%}
  {%- endif -%}
  {%- if message.content -%}{{- message.content + '<|close|>' -}}{%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '<|open|>call of ' + call.function.name + '<|sep|>' -}}
    {%- for key, value in call.function.arguments.items() -%}
      {{- '<|open|>' + key + '<|sep|>' -}}{{- value if value is string else value | tojson -}}{{- '<|close|>' + key -}}
    {%- endfor -%}
    {{- '<|close|>call' -}}
  {%- endfor -%}
  {{- '<|stop|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|open|>assistant<|sep|>' -}}{%- endif -%}
"""
"""Each argument has tags of its own, and text that is empty has none: added ones change the shape of the turn."""


@pytest.mark.parametrize(
    ("last", "new", "end"),
    [
        (turn("", call(1, {})), [result(1)], "call of list<|sep|>"),
        (turn("I look.", call(1, {})), [result(1)], "call of list<|sep|>"),
        (turn("", call(1, {"in": "a"}), call(2, {}, "root")), [result(1), result(2)], "call of root<|sep|>"),
        (turn("", call(1, {}, "root"), call(2, {"in": "a"})), [result(1), result(2)], "<|sep|>a"),
        (turn("", call(1, {}, "root"), call(2, {})), [result(1), result(2)], "call of list<|sep|>"),
        (turn(reasoning="Which?"), [NEXT], "Which?"),
    ],
    ids=["one call", "text and a call", "the last call", "the first call", "both calls", "reasoning alone"],
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_i1_a_turn_whose_shape_another_text_would_change_is_bridged(
    last: Any, new: list[Any], end: str, is_cut: bool
) -> None:
    sampled = TemplateRenderer(make_tokenizer(TAGS, control_tokens=CONTROL)).render_text([QUESTION, last])
    sampled = sampled.partition("<|open|>assistant<|sep|>")[2]
    if is_cut:
        sampled = sampled[: sampled.rindex(end) + len(end)]
    text, outcome, _, tokenizer = bridge_after(TAGS, [QUESTION], last, new, sampled=sampled, stop="")
    assert isinstance(outcome, Bridge), outcome
    assert outcome.closing is (Closing.TRUNCATED if is_cut else Closing.NONE)
    assert text.endswith(sampled + tokenizer.decode(outcome.bridge_ids.tolist()))
    closing = tokenizer.decode(outcome.bridge_ids[: outcome.num_closing].tolist())
    assert closing.endswith("<|stop|>") if is_cut else not closing


def test_i1_a_call_without_arguments_whose_name_decides_what_follows_is_refused() -> None:
    by_name = "{%- for call in message.tool_calls or [] -%}{{- call.function.name | length -}}{%- endfor -%}"
    template = TAGS.replace("{{- '<|stop|>' -}}", "{{- '<|stop|>' -}}" + by_name)
    _, outcome, _, _ = bridge_after(template, [QUESTION], turn("", call(1, {})), [result(1)], stop="<|stop|>")
    assert isinstance(outcome, Refusal), outcome


# --- characters that marks consist of


@pytest.mark.parametrize("text", ["\U000f024b src \U000f0219 README", "\ue000 \ue0b0", "\U0010fffd"])
def test_i1_private_use_characters_in_a_history_are_no_marks(text: str) -> None:
    history, last = [{"role": "user", "content": text}], turn("Two entries.")
    for template, stop in ((GLM, "<|user|>"), (chatml_with(), "<|im_end|>")):
        written, outcome, _, tokenizer = bridge_after(
            template, history, last, [NEXT], stop=stop, control_tokens=GLM_CONTROL_TOKENS
        )
        check_exact(written, outcome, tokenizer, f"Two entries.{stop}")


@pytest.mark.parametrize("new", ["\U000f024b src", "say \ue000"])
def test_i1_private_use_characters_in_new_messages_are_no_marks(new: str) -> None:
    last = turn("Two entries.")
    written, outcome, _, tokenizer = bridge_after(
        GLM, [QUESTION], last, [{"role": "user", "content": new}], stop="<|user|>", control_tokens=GLM_CONTROL_TOKENS
    )
    check_exact(written, outcome, tokenizer, "Two entries.<|user|>")


# --- words that switch something

SWITCH = chatml_with(
    before_prompt="{%- set ns = namespace(off=false) -%}{%- for m in messages if m.role == 'user' -%}"
    "{%- set ns.off = '/no_think' in m.content -%}{%- endfor -%}"
).replace("message.content + '<|im_end|>", "(message.content | replace('/no_think', '')).strip() + '<|im_end|>")
SWITCH = SWITCH.replace(
    "'<|im_start|>assistant\\n' -}}{%- endif", "'<|im_start|>assistant\\n' + ('<|sep|>' if ns.off else '') -}}{%- endif"
)


@pytest.mark.parametrize(
    "text", ["/no_think", "List all /no_think", "/no_think List all", "List /no_think all", "List"]
)
def test_i1_a_new_message_with_a_word_that_the_template_obeys_and_cuts_is_bridged(text: str) -> None:
    new = [{"role": "user", "content": text}]
    written, outcome, _, tokenizer = bridge_after(SWITCH, [QUESTION], turn("Two."), new, stop="<|im_end|>")
    assert ("<|sep|>" in written) is ("/no_think" in text)
    check_exact(written, outcome, tokenizer, "Two.<|im_end|>")


@pytest.mark.parametrize("dropped", ["'quiet' in message.content", "message.content == 'be quiet'"])
def test_i1_a_new_message_that_is_dropped_because_of_a_word_is_refused(dropped: str) -> None:
    template = SWITCH.replace("for message in messages", f"for message in messages if not ({dropped})")
    new = [{"role": "user", "content": "be quiet"}]
    _, outcome, _, _ = bridge_after(template, [QUESTION], turn("Two."), new, stop="<|im_end|>")
    assert isinstance(outcome, Refusal), outcome
