"""P2: what a template would do to what a bridge follows, for shipped templates as they read by eye."""

import functools
from typing import Any

import numpy as np
import pytest

from support.corpus import corpus_template
from support.corpus_oracle import facts_of
from support.templates import CHATML, QWEN, TOOLS_IN_LAST_QUESTION, chatml_with
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.rendering.base import Bridge, HistoryEffect, HistoryPolicy, Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

KEPT, DROPS = HistoryEffect.KEPT, HistoryEffect.DROPS_REASONING
USER: Any = {"role": "user", "content": "go on"}
RESULT: Any = {"role": "tool", "content": "42", "tool_call_id": "call00001", "name": "add"}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
]


def turn(*, calls: bool, reasons: bool) -> Any:
    message: Any = {"role": "assistant", "content": "" if calls else "so"}
    if calls:
        function = {"name": "add", "arguments": {"x": 1}}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message | ({"reasoning_content": "hm"} if reasons else {})


@functools.cache
def renderer_and_tokenizer(name: str, history: HistoryPolicy | str) -> tuple[TemplateRenderer, Any]:
    tokenizer = corpus_template(name).tokenizer()
    return TemplateRenderer(tokenizer, history=history), tokenizer


def bridge(name: str, *, calls: bool, reasons: bool, history: HistoryPolicy | str = "exact") -> Bridge | Refusal:
    renderer, tokenizer = renderer_and_tokenizer(name, history)
    facts = facts_of(corpus_template(name))
    stop = (facts.stop_of_calls if calls else "") or facts.stop or ("<|observation|>" if calls else "<|user|>")
    ids = np.array([tokenizer.convert_tokens_to_ids(stop)], np.int32)
    new = [RESULT if calls else USER]
    return renderer.bridge_to_next_turn(
        np.array([1]), ids, new, assistant=turn(calls=calls, reasons=reasons), tools=TOOLS, earlier=[USER]
    )


# template: effect of a question after an answer, without and with reasoning, and of a result after a call, likewise
EFFECTS = {
    "trl/qwen2_5": (KEPT, DROPS, KEPT, DROPS),
    "trl/qwen3_instruct_2507": (KEPT, DROPS, KEPT, DROPS),
    "trl/qwen3_training": (KEPT, KEPT, KEPT, KEPT),
    "trl/qwen3_8": (KEPT, KEPT, KEPT, KEPT),
    "trl/llama3_1": (KEPT, DROPS, KEPT, DROPS),
    "trl/muse_glimmer": (KEPT, KEPT, KEPT, KEPT),
    "trl/qwen3_6": (DROPS, DROPS, KEPT, KEPT),
    "trl/glm4moe": (KEPT, DROPS, KEPT, KEPT),
    "trl/gptoss": (KEPT, DROPS, KEPT, KEPT),
    "trl/gemma4": (KEPT, DROPS, KEPT, KEPT),
    "trl/lfm2_2_5": (KEPT, DROPS, KEPT, KEPT),
    "trl/qwen3": (DROPS, DROPS, DROPS, KEPT),  # an empty <think></think> stands in the last turn only
    "trl/nemotron_3_nano": (
        DROPS,
        DROPS,
        DROPS,
        KEPT,
    ),  # the prompt's <think> has another white space than an empty one
}


@pytest.mark.parametrize("name", EFFECTS)
def test_the_effect_on_history_is_what_the_template_does_by_eye(name: str) -> None:
    cases = [(False, False), (False, True), (True, False), (True, True)]
    outcomes = [bridge(name, calls=calls, reasons=reasons) for calls, reasons in cases]
    assert tuple(outcome.history if isinstance(outcome, Bridge) else outcome for outcome in outcomes) == EFFECTS[name]


@pytest.mark.parametrize("name", ["trl/glm4moe", "trl/gemma4", "trl/qwen3_6"])
def test_reasoning_of_an_earlier_turn_that_a_question_drops_is_an_effect(name: str) -> None:
    renderer, tokenizer = renderer_and_tokenizer(name, "exact")
    ids = np.array(tokenizer.encode("so", add_special_tokens=False), np.int32)
    for reasons, effect in ((True, DROPS), (False, KEPT)):
        earlier = [USER, turn(calls=True, reasons=reasons), RESULT]
        if not reasons and name == "trl/qwen3_6":
            continue  # it writes an empty <think></think>, and drops that
        outcome = renderer.bridge_to_next_turn(
            np.array([1]), ids, [USER], assistant=turn(calls=False, reasons=False), tools=TOOLS, earlier=earlier
        )
        assert isinstance(outcome, Bridge), outcome
        assert outcome.history is effect


def test_an_empty_reasoning_that_the_model_did_not_sample_is_no_effect() -> None:
    """The effect is on what was sampled: qwen3 writes an empty <think></think> into the last turn, and not later."""
    renderer, tokenizer = renderer_and_tokenizer("trl/qwen3", "exact")
    for text, effect in (("so<|im_end|>", KEPT), ("<think>\n\n</think>\n\nso<|im_end|>", DROPS)):
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        prompt = renderer.render([USER], tools=TOOLS).token_ids
        outcome = renderer.bridge_to_next_turn(
            prompt, ids, [USER], assistant=turn(calls=False, reasons=False), tools=TOOLS, earlier=[USER]
        )
        assert isinstance(outcome, Bridge)
        assert outcome.history is effect


def test_a_generation_prompt_that_history_does_not_repeat_is_an_effect_on_reasoning() -> None:
    outcome = bridge("trl/deepseekv3", calls=False, reasons=False)
    assert isinstance(outcome, Bridge)
    assert outcome.history is DROPS


def test_tools_that_move_to_the_last_question_rewrite_history() -> None:
    tokenizer = make_tokenizer(TOOLS_IN_LAST_QUESTION)
    ids = np.array([tokenizer.convert_tokens_to_ids("<|im_end|>")], np.int32)
    outcome = TemplateRenderer(tokenizer).bridge_to_next_turn(
        np.array([1]), ids, [USER], assistant=turn(calls=False, reasons=False), tools=TOOLS, earlier=[USER]
    )
    assert isinstance(outcome, Bridge)
    assert outcome.history is HistoryEffect.REWRITTEN


@pytest.mark.parametrize("history", ["template", HistoryPolicy.TEMPLATE])
def test_the_template_policy_refuses_a_bridge_whose_history_would_be_rewritten(history: str) -> None:
    refused = bridge("trl/qwen3_6", calls=False, reasons=True, history=history)
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.REWRITES_HISTORY
    assert isinstance(bridge("trl/qwen3_6", calls=True, reasons=True, history=history), Bridge)
    assert isinstance(bridge("trl/qwen3_6", calls=False, reasons=True, history="exact"), Bridge)


def test_a_history_policy_that_does_not_exist_is_named_with_those_that_do() -> None:
    names = r"\['exact', 'template', 'repeat_system'\]"
    with pytest.raises(InvalidInputError, match=rf"history must be one of {names}, got 'keep'"):
        TemplateRenderer(make_tokenizer(QWEN), history="keep")


ONLY_THE_LAST_CALL = chatml_with().replace("message.tool_calls or []", "(message.tool_calls or [])[-1:]")


@pytest.mark.parametrize(
    ("template", "num_calls", "effect"),
    [
        (CHATML, 1, HistoryEffect.REWRITTEN),
        (ONLY_THE_LAST_CALL, 2, HistoryEffect.REWRITTEN),
        (CHATML, 0, KEPT),
        (chatml_with(), 2, KEPT),
    ],
    ids=["no call is rendered", "one of two is rendered", "no call is made", "all are rendered"],
)
def test_a_call_that_the_template_does_not_render_is_not_kept(
    template: str, num_calls: int, effect: HistoryEffect
) -> None:
    """The model sampled it; it is no part of the content of the message that is rendered afresh."""
    tokenizer = make_tokenizer(template, eos_token="<|im_end|>")
    renderer = TemplateRenderer(tokenizer, parser="hermes")
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"x": {k}}}}}\n</tool_call>' for k in range(num_calls)]
    sampled = tokenizer("\n".join(calls) or "It is 42.", add_special_tokens=False)["input_ids"]
    completion_ids = token_ids([*sampled, tokenizer.eos_token_id])
    parsed = renderer.parse_response(completion_ids)
    assert len(parsed.tool_calls) == num_calls
    message = parsed.to_message([f"call0000{k + 1}" for k in range(num_calls)])
    results = [{**RESULT, "tool_call_id": f"call0000{k + 1}"} for k in range(num_calls)] or [USER]
    outcome = renderer.bridge_to_next_turn(
        renderer.render([USER]).token_ids, completion_ids, results, assistant=message, earlier=[USER]
    )
    assert isinstance(outcome, Bridge)
    assert outcome.history is effect


@pytest.mark.parametrize(
    ("sampled", "effect"),
    [("<tool_call>\n{bad\n</tool_call>", HistoryEffect.REWRITTEN), ("", KEPT), (" \n", KEPT)],
    ids=["a call that failed", "nothing", "white space"],
)
def test_a_call_that_failed_and_is_in_no_message_is_not_kept(sampled: str, effect: HistoryEffect) -> None:
    tokenizer = make_tokenizer(chatml_with(), eos_token="<|im_end|>")
    renderer = TemplateRenderer(tokenizer)
    completion_ids = token_ids(tokenizer(sampled + "<|im_end|>", add_special_tokens=False)["input_ids"])
    parsed = renderer.parse_response(completion_ids)
    message = parsed.to_message(["call00001"] * len(parsed.tool_calls))
    outcome = renderer.bridge_to_next_turn(
        renderer.render([USER]).token_ids, completion_ids, [USER], assistant=message, earlier=[USER]
    )
    assert isinstance(outcome, Bridge)
    assert outcome.history is effect


MOVES_SYSTEM = (
    "{%- set last = (messages | selectattr('role', 'equalto', 'user') | list | last) -%}"
    "{%- for m in messages if m.role != 'system' -%}"
    "{{- '[INST] ' if m.role == 'user' else '' -}}"
    "{%- if messages[0].role == 'system' and m == last -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}"
    "{{- m.content + ('[/INST]' if m.role == 'user' else '</s>') -}}{%- endfor -%}"
)
"""As Mistral's: the system text stands in the last question."""
MOVES_QUESTION = MOVES_SYSTEM.replace("messages[0].role == 'system'", "messages[1].role == 'user'").replace(
    "messages[0].content", "messages[1].content"
)


@pytest.mark.parametrize(
    ("template", "history", "is_bridged"),
    [
        (MOVES_SYSTEM, "exact", False),
        (MOVES_SYSTEM, "template", False),
        (MOVES_SYSTEM, "repeat_system", True),
        (MOVES_QUESTION, "repeat_system", False),
    ],
)
def test_a_system_text_that_the_template_moves_behind_the_turn_is_repeated_by_choice(
    template: str, history: str, is_bridged: bool
) -> None:
    tokenizer = make_tokenizer(template, eos_token="</s>")
    renderer = TemplateRenderer(tokenizer, history=history)
    earlier: Any = [{"role": "system", "content": "go"}, {"role": "user", "content": "Where to go on?"}]
    turn: Any = {"role": "assistant", "content": "There."}
    completion_ids = token_ids([*tokenizer.encode("There.", add_special_tokens=False), tokenizer.eos_token_id])
    outcome = renderer.bridge_to_next_turn(
        renderer.render(earlier).token_ids, completion_ids, [USER], assistant=turn, earlier=earlier
    )
    assert isinstance(outcome, Bridge) is is_bridged, outcome
    if isinstance(outcome, Bridge):
        assert tokenizer.decode(outcome.bridge_ids.tolist()) == "[INST] go\n\ngo on[/INST]"
        assert outcome.history is HistoryEffect.REWRITTEN
