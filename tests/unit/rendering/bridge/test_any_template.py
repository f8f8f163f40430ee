"""I1 for templates that look at more than roles: each with a conversation after which it writes something unusual."""

from typing import Any

import pytest

from support.exact_bridges import is_exact
from support.templates import RARELY_DIFFERENT, chatml_with
from support.tokenizers import make_tokenizer
from unbroken.errors import ToolDefinitionError
from unbroken.rendering.base import Bridge, Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

EXTRA = "{{- '<|im_start|>system\\nextra<|im_end|>\\n' -}}"


def when(condition: str) -> str:
    return f"{{%- if {condition} -%}}{EXTRA}{{%- endif -%}}"


def number_of(role: str) -> str:
    return f"messages[:loop.index] | selectattr('role', 'equalto', '{role}') | list | length"


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def turn(text: str) -> Any:
    return {"role": "assistant", "content": text}


def call(number: int, arguments: dict[str, Any], text: str = "") -> Any:
    function = {"name": "add", "arguments": arguments}
    return {**turn(text), "tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": function}]}


def result(number: int) -> Any:
    return {"role": "tool", "content": "r", "tool_call_id": f"call{number:05d}", "name": "add"}


TWO_CALLS: Any = {
    **call(0, {"x": 1}),
    "tool_calls": [*call(0, {"x": 1})["tool_calls"], *call(1, {"x": 2})["tool_calls"]],
}
LAST_CALL = "(messages | selectattr('tool_calls', 'defined') | list | last).tool_calls[0].function.arguments"
MANY_RESULTS = [user("go"), *(message for k in range(12) for message in (call(k, {"x": k}), result(k)))]
MANY_QUESTIONS = [message for k in range(13) for message in (user("u"), turn("a"))] + [user("u")]

BROWSE: Any = {
    **turn(""),
    "tool_calls": [{"id": "call00099", "type": "function", "function": {"name": "browser", "arguments": {"x": 1}}}],
}
PAGE: Any = {"role": "tool", "content": "r", "tool_call_id": "call00099", "name": "browser"}

# template, history, turn, new messages
CASES: dict[str, tuple[str, list[Any], Any, list[Any]]] = {
    "a result quotes the first of two calls' arguments": (
        chatml_with(before_result="{{- " + LAST_CALL + " | tojson -}}"),
        [user("hi")],
        TWO_CALLS,
        [result(0), result(1)],
    ),
    "a result names the arguments": (
        chatml_with(before_result="{{- " + LAST_CALL + ".keys() | join(',') -}}"),
        [user("hi")],
        call(0, {"x": 1, "y": 2}),
        [result(0)],
    ),
    "a result counts the arguments": (
        chatml_with(before_result="{{- " + LAST_CALL + " | length -}}"),
        [user("hi")],
        call(0, {"x": 1, "y": 2}),
        [result(0)],
    ),
    "one character that ends a text": (
        chatml_with(after_turn=when("messages[0].content.endswith('?')")),
        [user("why?")],
        turn("so"),
        [user("more")],
    ),
    "two texts at the ends of one message": (
        chatml_with(
            after_turn=when("messages[0].content.startswith('<note>') and messages[0].content.endswith('</note>')")
        ),
        [user("<note>x</note>")],
        turn("so"),
        [user("more")],
    ),
    "two texts anywhere in one message": (
        chatml_with(after_turn=when("'fast' in messages[0].content and 'cheap' in messages[0].content")),
        [user("cheap and fast")],
        turn("so"),
        [user("more")],
    ),
    "a tool of this name, but not in the first turn": (
        chatml_with(before_result=when("message.name == 'browser' and messages | length > 3")),
        MANY_QUESTIONS,
        BROWSE,
        [PAGE],
    ),
    "a text held in a variable": (
        chatml_with(after_turn="{%- set flag = '/think' -%}" + when("flag in messages[0].content")),
        [user("do /think")],
        turn("so"),
        [user("more")],
    ),
    "a text put together": (
        chatml_with(after_turn=when("'/th' ~ 'ink' == messages[0].content")),
        [user("/think")],
        turn("so"),
        [user("more")],
    ),
    "a text in a block": (
        chatml_with(after_turn="{%- set flag -%}/think{%- endset -%}" + when("flag in messages[0].content")),
        [user("do /think")],
        turn("so"),
        [user("more")],
    ),
    "a list of texts": (
        chatml_with(
            after_turn="{%- for flag in ['/think', '/deep'] -%}"
            + when("flag in messages[0].content")
            + "{%- endfor -%}"
        ),
        [user("do /deep")],
        turn("so"),
        [user("more")],
    ),
    "a text that is a type elsewhere": (
        chatml_with(after_turn=when("'image' in messages[0].content")),
        [user("see image")],
        turn("so"),
        [user("more")],
    ),
    "a flag kept for the prompt": (
        chatml_with(
            before_prompt="{%- set off = '/no_think' -%}{%- set ns = namespace(off=false) -%}{%- for m in messages -%}"
            "{%- if off in m.content -%}{%- set ns.off = true -%}{%- endif -%}{%- endfor -%}"
            + when("add_generation_prompt and ns.off")
        ),
        [user("be quick /no_think")],
        turn("so"),
        [user("more")],
    ),
    "more than ten results": (
        chatml_with(after_turn=when(number_of("tool") + " > 10")),
        MANY_RESULTS,
        call(50, {"x": 1}),
        [result(50)],
    ),
    "more than twelve questions": (
        chatml_with(after_turn=when(number_of("user") + " > 12")),
        MANY_QUESTIONS,
        turn("so"),
        [user("more")],
    ),
    "a long turn": (
        chatml_with(after_turn=when("message.content | length > 200")),
        [user("hi")],
        turn("word " * 60),
        [user("more")],
    ),
    "a short turn": (
        chatml_with(after_turn=when("message.content | length < 5")),
        [user("hi")],
        turn("so"),
        [user("more")],
    ),
    "a turn of one length": (
        chatml_with(after_turn=when("message.content | length == 42")),
        [user("hi")],
        turn("x" * 42),
        [user("more")],
    ),
    "a turn that asks": (
        chatml_with(after_turn=when("message.content.endswith('?')")),
        [user("hi")],
        turn("why?"),
        [user("more")],
    ),
    "an empty turn": (
        chatml_with(after_turn=when("not message.content and not message.tool_calls")),
        [user("hi")],
        turn(""),
        [user("more")],
    ),
    "a blank turn": (
        chatml_with(after_turn=when("message.content and not message.content.strip()")),
        [user("hi")],
        turn("\n"),
        [user("more")],
    ),
    "a turn left out if it is empty": (
        chatml_with().replace("messages -%}", "messages if message.content or message.role != 'assistant' -%}"),
        [user("hi")],
        turn(""),
        [user("more")],
    ),
    "a call without arguments": (
        chatml_with(after_turn=when("message.tool_calls and not message.tool_calls[0].function.arguments")),
        [user("hi")],
        call(0, {}),
        [result(0)],
    ),
}

FLAG_AT_ODD_PLACES = (
    "{%- set ns = namespace(on=false) -%}{%- for message in messages[::-1] -%}"
    "{%- if message.role == 'user' and message.content | length < 40 and loop.index is odd -%}"
    "{%- set ns.on = true -%}{%- endif -%}{%- endfor -%}"
)
SIX_CALLS = "add_generation_prompt and messages | selectattr('tool_calls', 'defined') | list | length > 5"
EIGHT_RESULTS = "messages | selectattr('role', 'equalto', 'tool') | list | length > 8"
RARE_TOGETHER: dict[str, tuple[str, list[Any], Any, list[Any]]] = {
    "many calls, and a key and digits in the first message": (
        chatml_with(
            before_prompt=when(f"{SIX_CALLS} and messages[0].content.isdigit() and messages[0].cache is defined")
        ),
        [{**user("42"), "cache": True}, *MANY_RESULTS[1:]],
        turn("so"),
        [user("more")],
    ),
    "two texts, and a number of messages in a narrow range": (
        chatml_with(
            before_prompt=when(
                "add_generation_prompt and '/fast' in messages[0].content and '/deep' in messages[-1].content "
                "and messages | length > 9 and messages | length < 13"
            )
        ),
        [user("x /fast"), *[turn("a"), user("b")] * 4],
        turn("so"),
        [user("do /deep")],
    ),
    "conditions inside conditions": (
        chatml_with(
            before_prompt="{%- if messages | length > 30 -%}{%- if messages[0].content | length > 300 -%}"
            + when("add_generation_prompt and messages[0].name == 'bob'")
            + "{%- endif -%}{%- endif -%}"
        ),
        [{**user("y" * 400), "name": "bob"}, *[turn("a"), user("b")] * 16],
        turn("so"),
        [user("more")],
    ),
    "a result of digits after many results and a system message": (
        chatml_with(
            before_result=when(f"message.content.isdigit() and messages[0].role == 'system' and {EIGHT_RESULTS}")
        ),
        [{"role": "system", "content": "s"}, *MANY_RESULTS],
        call(50, {"x": 1}),
        [{**result(50), "content": "42"}],
    ),
    "short questions at odd places, where the new one is long": (
        chatml_with(before_prompt=FLAG_AT_ODD_PLACES + when("add_generation_prompt and not ns.on")),
        [user("hi"), turn("a"), turn("b"), user("x" * 60)],
        turn("so"),
        [user("x" * 60)],
    ),
}
"""Each depends on things that are rare in random conversations, and there in very few of them at once."""


def text_and_bridge(template: str, history: list[Any], last: Any, new: list[Any]) -> tuple[str, Any, Any]:
    """What the template writes after the turn's end, the bridge after the same turn sampled whole, the tokenizer."""
    tokenizer = make_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    text = tokenizer.apply_chat_template([*history, last, *new], tokenize=False, add_generation_prompt=True)
    before = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=False)
    assert text.startswith(before)
    end = text.find("<|im_end|>", len(before)) + len("<|im_end|>")
    completion_ids = token_ids([5, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    outcome = renderer.bridge_to_next_turn(token_ids([]), completion_ids, new, assistant=last, earlier=history)
    return text[end:], outcome, tokenizer


DEPENDS_ON_THE_TEXTS = (
    "a short turn",
    "a turn of one length",
    "a turn that asks",
    "an empty turn",
    "a blank turn",
    "a turn left out if it is empty",
    "a result quotes the first of two calls' arguments",
    "a result of digits after many results and a system message",
)
"""Sentinels stand at the end of the turn and as texts of the new messages: what the template does for these texts
cannot be shown."""


@pytest.mark.parametrize("case", [*CASES, *RARE_TOGETHER])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("{%- macro all() -%}", "{%- endmacro -%}{{- all() -}}"),
        ("{%- set all -%}", "{%- endset -%}{{- all -}}"),
    ],
    ids=["plain", "macro", "variable"],
)
def test_i1_a_template_that_looks_at_more_is_bridged_exactly_or_refused(before: str, after: str, case: str) -> None:
    template, history, last, new = (CASES | RARE_TOGETHER)[case]
    usual, bridge, tokenizer = text_and_bridge(before + chatml_with() + after, history, last, new)
    assert isinstance(bridge, Bridge)
    assert tokenizer.decode(bridge.bridge_ids.tolist()) == usual
    written, outcome, _ = text_and_bridge(before + template + after, history, last, new)
    assert written != usual, "the case changes nothing"
    if case in DEPENDS_ON_THE_TEXTS:
        assert isinstance(outcome, Refusal)
        assert outcome.reason in (RefusalReason.HISTORY_DEPENDENT, RefusalReason.REORDERS_TURN)
    else:
        assert isinstance(outcome, Bridge), outcome
        assert tokenizer.decode(outcome.bridge_ids.tolist()) == written


@pytest.mark.parametrize("where", RARELY_DIFFERENT)
def test_i1_a_dependence_on_a_rare_first_message_is_in_the_bridge(where: str) -> None:
    bridges = []
    for first in ("go on", "look outside, and see what is there when"):
        history, last, new = [user(first)], turn("so"), [user("more")]
        written, bridge, tokenizer = text_and_bridge_of_any(RARELY_DIFFERENT[where], history, last, new)
        assert isinstance(bridge, Bridge), bridge
        bridges.append(tokenizer.decode(bridge.bridge_ids.tolist()))
        assert written.endswith("so<|im_end|>" + bridges[-1])
    assert bridges[0] != bridges[1]


@pytest.mark.parametrize("text", ["", "\n", "so"])
def test_i1_white_space_beside_a_call_is_neither_text_nor_nothing(text: str) -> None:
    for condition in ("message.tool_calls and message.content", "message.tool_calls and message.content.strip()"):
        written, bridge, tokenizer = text_and_bridge(
            chatml_with(after_turn=when(condition)), [user("hi")], call(0, {"x": 1}, text), [result(0)]
        )
        assert isinstance(bridge, Bridge), bridge
        assert tokenizer.decode(bridge.bridge_ids.tolist()) == written


# --- tools


def tool(name: str = "add", *, description: str = "adds", **parameters: Any) -> Any:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "description": "a number"}}, **parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


RETURNING = {"type": "function", "function": {"name": "add", "returns": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("condition", "special"),
    [
        ("tools", [tool()]),
        ("tools and tools | length > 5", [tool(f"t{k}") for k in range(6)]),
        ("tools and tools[0].function.name == 'browser'", [tool("browser")]),
        ("tools and 'python' in (tools | tojson)", [tool(description="runs python code")]),
        ("tools and tools[0].function.parameters.required", [tool(required=["x"])]),
        ("tools and (tools | tojson | length) > 3000", [tool(description="long " * 1000)]),
        ("tools and tools[0].function.returns is defined", [RETURNING]),
        ("tools and (tools[0].function.name | length) % 7 == 6", [tool("sixsix")]),
    ],
    ids=["any", "number", "name", "text", "required", "length", "unknown_key", "length_of_a_name"],
)
def test_i1_a_bridge_that_depends_on_the_tools_is_exact_for_each_of_them(condition: str, special: list[Any]) -> None:
    tokenizer = make_tokenizer(chatml_with(before_prompt=when(condition)))
    renderer = TemplateRenderer(tokenizer)
    end = token_ids([5, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    history, last, new = [user("hi")], turn("so"), [user("more")]
    lengths = []
    for tools in ([], special, []):
        bridge = renderer.bridge_to_next_turn(token_ids([]), end, new, assistant=last, tools=tools, earlier=history)
        assert isinstance(bridge, Bridge)
        assert is_exact(renderer, bridge, [*history, last, *new], tools)
        lengths.append(len(bridge.bridge_ids))
    assert lengths[0] == lengths[2] < lengths[1]


def test_malformed_tools_are_an_error() -> None:
    renderer = TemplateRenderer(make_tokenizer(chatml_with()))
    with pytest.raises(ToolDefinitionError, match=r"tools\[0\] must be a mapping"):
        renderer.bridge_to_next_turn(
            token_ids([1]),
            token_ids([2]),
            [user("more")],
            assistant=turn("so"),
            tools=["add"],  # type: ignore[list-item]
            earlier=[user("hi")],
        )


# --- new messages that are dropped, repeated, moved


@pytest.mark.parametrize(
    "loop",
    [
        "messages[:1] + messages[2:]",
        "messages[:2] + messages[3:]",
        "messages[:3] + messages[2:]",
        "messages[:2] + messages[2:] | reverse | list",
        "messages[2:3] + messages[:2] + messages[3:]",
        "messages | selectattr('role', 'equalto', 'assistant') | list + messages | rejectattr('role', 'equalto', "
        "'assistant') | list",
    ],
    ids=["turn_dropped", "new_dropped", "new_repeated", "new_reversed", "new_first", "history_after_the_turn"],
)
@pytest.mark.parametrize("rewrites", [False, True], ids=["marked", "rewritten"])
def test_i1_messages_that_are_dropped_repeated_or_moved_are_refused(loop: str, rewrites: bool) -> None:
    template = chatml_with().replace("for message in messages", f"for message in ({loop})")
    assert template != chatml_with()
    if rewrites:
        template = template.replace("message.content", "(message.content | replace('o', '0'))")
    history, last, new = [user("one")], turn("so"), [user("two"), user("three")]
    _, outcome, _ = text_and_bridge_of_any(template, history, last, new)
    assert isinstance(outcome, Refusal), outcome
    assert outcome.reason in (
        RefusalReason.DROPS_MESSAGE,
        RefusalReason.REORDERS_TURN,
        RefusalReason.HISTORY_DEPENDENT,
        RefusalReason.UNDERIVABLE,
    )


def test_a_refusal_says_what_differs_side_by_side() -> None:
    template, history, last, new = CASES["a turn that asks"]
    _, outcome, _ = text_and_bridge(template, history, last, new)
    assert outcome.reason is RefusalReason.HISTORY_DEPENDENT
    assert "+1 ends of turns" in outcome.detail
    assert "extra" in outcome.detail.split("it reads ")[1].split(", not ")[0]
    length = "{{- (messages | selectattr('role', 'equalto', 'assistant') | list | last).content | length -}}"
    _, outcome, _ = text_and_bridge_of_any(chatml_with(before_prompt=length), history, last, new)
    assert isinstance(outcome, Refusal)
    assert "4' instead of ..'" in outcome.detail
    assert outcome.detail.endswith("before '<|im_start|>assistant\\n'")


@pytest.mark.parametrize("text", ["Wq7Text", "Wq7", "Wq7Text<|im_end|>\n", "Xq7New0z", "Wq7Wq8"])
def test_words_that_look_like_sentinels_are_words(text: str) -> None:
    history, last, new = [user(text)], turn(text), [user(text), user(f"{text} again")]
    written, outcome, tokenizer = text_and_bridge_of_any(chatml_with(), history, last, new)
    assert isinstance(outcome, Bridge), outcome
    assert written.endswith(tokenizer.decode(outcome.bridge_ids.tolist()))


def text_and_bridge_of_any(template: str, history: list[Any], last: Any, new: list[Any]) -> tuple[str, Any, Any]:
    """As `text_and_bridge`, with the whole text, for templates that do not write the history first."""
    tokenizer = make_tokenizer(template)
    text = tokenizer.apply_chat_template([*history, last, *new], tokenize=False, add_generation_prompt=True)
    completion_ids = token_ids([5, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    renderer = TemplateRenderer(tokenizer)
    outcome = renderer.bridge_to_next_turn(token_ids([]), completion_ids, new, assistant=last, earlier=history)
    return text, outcome, tokenizer


PINS = "{%- for m in messages if m.role == 'user' and CONDITION -%}{{- '(' + m.content + ') ' -}}{%- endfor -%}"


@pytest.mark.parametrize(
    ("condition", "pinned"),
    [
        ("'keep' in m.content", "keep this"),
        ("m.content.startswith('keep')", "keep this"),
        ("m.content == 'keep'", "keep"),
        ("m.content | length == 9", "keep this"),
    ],
    ids=["a word in it", "its first word", "all of it", "its length"],
)
def test_i1_a_message_that_is_moved_because_of_what_it_says_is_refused(condition: str, pinned: str) -> None:
    """It moves into the header of the next turn, so that no more ends of turns stand there."""
    pins = PINS.replace("CONDITION", condition)
    prompt = "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    template = chatml_with().replace(prompt, "{{- '<|im_start|>assistant ' -}}" + pins + "{{- '\\n' -}}{%- endif -%}")
    assert template != chatml_with()
    template = template.replace(
        "for message in messages",
        f"for message in messages if not (message.role == 'user' and {condition})".replace("m.c", "message.c"),
    )
    for text, is_refused in ((pinned, True), ("so what", False)):
        history, last, new = [user(text), turn("a"), user("go on")], turn("so"), [user("more")]
        written, outcome, _ = text_and_bridge_of_any(template, history, last, new)
        assert written.endswith(f"assistant ({text}) \n" if is_refused else "assistant \n")
        assert isinstance(outcome, Refusal) is is_refused, outcome


@pytest.mark.parametrize("quotes", [True, False], ids=["quoted", "not quoted"])
def test_i5_a_control_token_that_an_earlier_message_spells_is_none_where_the_template_quotes_it(quotes: bool) -> None:
    quote = "{{- '<|im_start|>user re ' + messages[0].content + '\\n' + message.content + '<|im_end|>\\n' -}}"
    usual = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    rule = "{%- if loop.index > 2 -%}" + quote + "{%- else -%}" + usual + "{%- endif -%}"
    template = chatml_with().replace(usual, rule if quotes else usual)
    assert (template != chatml_with()) is quotes
    for text in ("why?", "why <|im_start|> and not <|im_end|>?"):
        written, outcome, tokenizer = text_and_bridge_of_any(template, [user(text)], turn("so"), [user("more")])
        if quotes and "<|" in text:
            assert isinstance(outcome, Refusal), outcome
            assert outcome.reason is RefusalReason.UNSAFE_TEXT
            assert "'<|im_" in outcome.detail
        else:
            assert isinstance(outcome, Bridge), outcome
            assert written.endswith(tokenizer.decode(outcome.bridge_ids.tolist()))


def test_i5_control_tokens_in_the_arguments_of_earlier_calls_are_looked_at_and_refuse_nothing() -> None:
    """They stand in objects and lists, beside what is no text."""
    arguments = {"lines": ["<|im_start|>", 4, None], "why": "<|im_end|>"}
    made = {**turn("a"), "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": arguments}}]}
    history, new = [user("why <|im_start|>?"), made, user("go on")], [user("more")]
    written, outcome, tokenizer = text_and_bridge_of_any(chatml_with(), history, turn("so"), new)
    assert isinstance(outcome, Bridge), outcome
    assert written.endswith(tokenizer.decode(outcome.bridge_ids.tolist()))
