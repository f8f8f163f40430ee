"""I1 where a template writes text between a turn and the next control token: none of it may be missing in a bridge."""

from typing import Any

import pytest

from support.tokenizers import make_tokenizer
from unbroken.rendering.base import Bridge, Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

QUESTION: Any = {"role": "user", "content": "Six times seven?"}
NEXT: Any = {"role": "user", "content": "And six times eight?"}
RESULT: Any = {"role": "tool", "content": "42", "name": "add"}
TURN: Any = {"role": "assistant", "content": "42"}
CALL: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"x": 42}}}],
}


def conversation_of(text: str) -> str:
    return "{%- for m in messages -%}" + text + "{%- endfor -%}"


CALLS = (
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {{ c.function.arguments | tojson }} done{% endfor %}"
)
HEADER_WITH_TEXT = (
    conversation_of("{{ m.role }}: see <|img|> {{ m.content }}\n\n")
    + "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT_BETWEEN_TURNS = (
    conversation_of("{{ '' if loop.first else '\n-- next: <|sep|>\n' }}{{ m.role }}: {{ m.content }}")
    + "{% if add_generation_prompt %}\n-- next: <|sep|>\nassistant: {% endif %}"
)
TEXT_AFTER_EACH_TURN = conversation_of("{{ m.role }}: {{ m.content }}\n-- next: <|sep|>\n") + "assistant: "
"""The generation prompt is written whether asked for or not."""
RESULT_HEADER_WITH_TEXT = (
    conversation_of(
        "{{ '\nthe result: <|img|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ m.content }}" + CALLS
    )
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS_OF_CALLS = (
    conversation_of("<|{{ m.role }}|>{{ m.content }}" + CALLS + "{{ '<|end|>' if m.role == 'assistant' else '' }}")
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROL = ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|img|>", "<|sep|>")


def bridge_after(template: str, turn: Any, new: Any, stop: str) -> tuple[str, Bridge | Refusal, Any]:
    """The whole text, and the bridge after a turn that ends with `stop`."""
    tokenizer = make_tokenizer(template, control_tokens=CONTROL)
    stop_id = tokenizer.eos_token_id if not stop else tokenizer.convert_tokens_to_ids(stop)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([QUESTION]).token_ids
    outcome = renderer.bridge_to_next_turn(prompt, token_ids([5, stop_id]), [new], assistant=turn, earlier=[QUESTION])
    text = tokenizer.apply_chat_template([QUESTION, turn, new], tokenize=False, add_generation_prompt=True)
    return text, outcome, tokenizer


@pytest.mark.parametrize(
    ("template", "turn", "new", "stop", "words"),
    [
        (HEADER_WITH_TEXT, TURN, NEXT, "", "user: see"),
        (TEXT_BETWEEN_TURNS, TURN, NEXT, "", "-- next:"),
        (TEXT_AFTER_EACH_TURN, TURN, NEXT, "<|sep|>", "-- next:"),
        (RESULT_HEADER_WITH_TEXT, CALL, RESULT, "<|img|>", "the result:"),
        (RESULT_HEADER_WITH_TEXT, TURN, RESULT, "<|img|>", "the result:"),
    ],
    ids=["of a header", "between turns", "after each turn", "of the results after calls", "of the results after text"],
)
def test_i1_text_before_the_first_control_token_after_a_turn_is_not_lost(
    template: str, turn: Any, new: Any, stop: str, words: str
) -> None:
    text, outcome, _ = bridge_after(template, turn, new, stop)
    assert words in text
    assert isinstance(outcome, Refusal), outcome
    assert outcome.reason is RefusalReason.UNDERIVABLE
    assert words in outcome.detail


@pytest.mark.parametrize(
    ("template", "turn", "new", "stop"),
    [
        (ENDS_OF_CALLS, CALL, RESULT, "<|end|>"),
        (ENDS_OF_CALLS, TURN, NEXT, "<|end|>"),
        (RESULT_HEADER_WITH_TEXT, TURN, NEXT, "<|user|>"),
        (RESULT_HEADER_WITH_TEXT, CALL, NEXT, "<|user|>"),
    ],
    ids=["calls", "text", "text before a header", "calls before a header"],
)
def test_i1_text_that_the_turn_itself_ends_with_is_no_cause_to_refuse(
    template: str, turn: Any, new: Any, stop: str
) -> None:
    text, outcome, tokenizer = bridge_after(template, turn, new, stop)
    assert isinstance(outcome, Bridge), outcome
    assert text.endswith(stop + tokenizer.decode(outcome.bridge_ids.tolist()))
