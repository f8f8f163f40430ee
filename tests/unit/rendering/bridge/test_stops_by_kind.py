"""Stops are found for each kind of turn: text, calls, reasoning. Without any, sampling is refused by name."""

from typing import Any

import pytest

from support import templates
from support.scripted_env import ScriptedEnv
from support.tokenizers import make_tokenizer
from unbroken import load_renderer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import StopTokenError
from unbroken.messages import Message, make_call
from unbroken.rendering.base import Bridge, Closing
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group, run_rollout
from unbroken.types import SamplingParams, token_ids

CONTROL = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|other|>")
QUESTION: Message = {"role": "user", "content": "Six times seven?"}
NEXT: Message = {"role": "user", "content": "And six times eight?"}


def tokenizer_of(template: str, eos: str) -> Any:
    return make_tokenizer(template, control_tokens=CONTROL, eos_token=eos)


def stops_of(template: str, eos: str) -> set[str | None]:
    renderer = TemplateRenderer(tokenizer_of(template, eos))
    return {renderer.facts.control_tokens.get_text(i) for i in renderer.get_stop_token_ids()}


def test_the_end_of_calls_that_text_with_a_header_follows_ends_a_turn() -> None:
    assert stops_of(templates.CALLS_BEFORE_A_TURN_OF_TEXT, "<|end|>") == {"<|end|>"}


def test_a_turn_whose_content_is_none_may_end_in_another_way() -> None:
    assert stops_of(templates.ANOTHER_END_WITHOUT_CONTENT, "<|end|>") == {"<|end|>", "<|calls|>"}


@pytest.mark.parametrize(
    "template",
    [templates.ONE_END_FOR_REASONING_AND_TURN, templates.CALLS_UNDER_A_HEADER_OF_THEIR_OWN],
    ids=["text ends like its reasoning", "a turn goes on after its text"],
)
async def test_a_turn_that_no_id_ends_is_an_error_by_name_before_anything_is_sampled(template: str) -> None:
    renderer = TemplateRenderer(tokenizer_of(template, "<|end|>"))
    with pytest.raises(StopTokenError, match=r"ends a turn of text.*stop_token_ids=\[\.\.\.\]"):
        renderer.get_stop_token_ids()
    env, engine = ScriptedEnv(), ScriptedEngine([])
    asked: dict[str, Any] = {
        "engine": engine, "renderer": renderer, "sampling": SamplingParams(), "limits": Limits()
    }  # fmt: skip
    with pytest.raises(StopTokenError):
        await run_rollout(env, **asked)
    with pytest.raises(StopTokenError):
        await run_group(lambda: env, 2, **asked)
    assert not env.calls
    assert not engine.requests


def test_a_tokenizer_without_any_end_of_text_is_an_error_by_name() -> None:
    tokenizer = tokenizer_of(templates.CHATML.replace("<|im_start|>", "@").replace("<|im_end|>", "#"), "<|end|>")
    tokenizer.eos_token = None
    with pytest.raises(StopTokenError, match="a turn of any kind"):
        TemplateRenderer(tokenizer).get_stop_token_ids()


@pytest.mark.parametrize(
    ("last", "closing"),
    [("<|other|>", Closing.FOREIGN_STOP), ("<|end|>", Closing.NONE), ("", Closing.TRUNCATED)],
    ids=["ended by another id", "ended as the template ends it", "cut"],
)
def test_i7_a_turn_that_ends_like_its_reasoning_is_ended_by_an_id_of_the_caller(last: str, closing: Closing) -> None:
    tokenizer = tokenizer_of(templates.ONE_END_FOR_REASONING_AND_TURN, "<|end|>")
    other, end = tokenizer.convert_tokens_to_ids(["<|other|>", "<|end|>"])
    renderer = load_renderer(tokenizer, stop_token_ids=[other, end])
    assert renderer.get_stop_token_ids() == (other,)
    sampled = token_ids(tokenizer.encode(f"<|content|>42{last}", add_special_tokens=False))
    prompt = renderer.render([QUESTION]).token_ids
    turn: Message = {"role": "assistant", "content": "42"}
    bridge = renderer.bridge_to_next_turn(prompt, sampled, [NEXT], assistant=turn, earlier=[QUESTION])
    assert isinstance(bridge, Bridge), bridge
    end = "" if closing is Closing.NONE else "<|end|>"
    written = tokenizer.decode(bridge.bridge_ids.tolist())
    assert written == f"{end}<|begin|>user<|content|>And six times eight?<|end|><|begin|>assistant"
    assert (bridge.closing, bridge.num_closing) == (closing, int(closing is not Closing.NONE))


def test_calls_end_with_their_own_token_where_text_ends_like_its_reasoning() -> None:
    template = templates.ONE_END_FOR_REASONING_AND_TURN.replace(
        "<|begin|>{{ m.role }}",
        "{%- if m.tool_calls -%}<|begin|>assistant<|tool|>{{ m.tool_calls[0].function | tojson }}<|calls|>{%- else -%}"
        "<|begin|>{{ m.role }}",
    ).replace("<|end|>{%- endfor -%}", "<|end|>{%- endif -%}{%- endfor -%}")
    assert "<|calls|>" in TemplateRenderer(tokenizer_of(template, "<|other|>")).render_text(
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": [make_call("c1", "add", {"a": 1})]}]
    )
    assert stops_of(template, "<|other|>") == {"<|calls|>", "<|other|>"}
    with pytest.raises(StopTokenError, match="a turn of text, reasoning and text, got none"):
        stops_of(template, "<|end|>")
