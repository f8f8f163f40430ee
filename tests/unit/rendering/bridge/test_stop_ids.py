"""Stop ids are proven: none of them stands inside a turn, and what they leave open of a turn's end is closed (I7)."""

from typing import Any

import pytest

from support import templates
from support.corpus import corpus_templates
from support.tokenizers import make_tokenizer
from unbroken.errors import TemplateError
from unbroken.messages import Message, make_call
from unbroken.rendering.base import Bridge, Closing
from unbroken.rendering.message_format import PROBE_TOOLS
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

QUESTION: Message = {"role": "user", "content": "Six times seven?"}
NEXT: Message = {"role": "user", "content": "And six times eight?"}
CONTROL = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")


def renderer_of(template: str, **options: Any) -> TemplateRenderer:
    return TemplateRenderer(make_tokenizer(template, control_tokens=CONTROL, eos_token="<|eos|>"), **options)


def stops_of(renderer: TemplateRenderer) -> set[str | None]:
    return {renderer.facts.control_tokens.get_text(i) for i in renderer.get_stop_token_ids()} - {"<|eos|>"}


def encode(renderer: TemplateRenderer, text: str) -> Any:
    tokenizer = renderer._encoder._tokenizer
    return token_ids(tokenizer.encode(text, add_special_tokens=False).ids)


def bridge_after(renderer: TemplateRenderer, sampled: str, turn: Message) -> tuple[Bridge, str]:
    prompt = renderer.render([QUESTION]).token_ids
    bridge = renderer.bridge_to_next_turn(prompt, encode(renderer, sampled), [NEXT], assistant=turn, earlier=[QUESTION])
    assert isinstance(bridge, Bridge), bridge
    return bridge, renderer._encoder.decode(bridge.bridge_ids.tolist())


TURN: Message = {"role": "assistant", "content": "42", "reasoning_content": "Easy"}
SAMPLED = "Easy<|close|>think<|sep|><|open|>response<|sep|>42"
END = "<|close|>response<|sep|><|close|>assistant<|sep|><|end_of_msg|>"
AFTER = (
    "<|open|>user<|sep|>And six times eight?<|close|>user<|sep|><|end_of_msg|>"
    "<|open|>assistant<|sep|><|open|>think<|sep|>"
)


def test_a_token_that_closes_every_tag_is_no_stop() -> None:
    assert stops_of(renderer_of(templates.TAGS_WITH_ONE_CLOSER)) == {"<|end_of_msg|>"}


@pytest.mark.parametrize(
    ("sampled", "closing", "text"),
    [(SAMPLED + END, Closing.NONE, AFTER), (SAMPLED, Closing.TRUNCATED, END + AFTER)],
    ids=["whole", "cut in its text"],
)
def test_i7_the_end_of_several_ids_is_written_from_where_the_model_left_it(
    sampled: str, closing: Closing, text: str
) -> None:
    renderer = renderer_of(templates.TAGS_WITH_ONE_CLOSER)
    bridge, written = bridge_after(renderer, sampled, TURN)
    assert (bridge.closing, written) == (closing, text)
    closed = renderer._encoder.decode(bridge.bridge_ids[: bridge.num_closing].tolist())
    assert closed == ("" if closing is Closing.NONE else END)


def test_stop_ids_that_are_given_and_stand_inside_a_turn_are_left_out() -> None:
    tokenizer = make_tokenizer(templates.TAGS_WITH_ONE_CLOSER, eos_token="<|close|>")
    close = tokenizer.convert_tokens_to_ids("<|close|>")
    renderer = TemplateRenderer(tokenizer, stop_token_ids=[close])
    assert stops_of(renderer) == {"<|end_of_msg|>"}


def test_an_end_between_text_and_calls_that_a_new_header_follows_ends_a_turn_of_its_own() -> None:
    assert stops_of(renderer_of(templates.CALLS_IN_A_TURN_OF_THEIR_OWN)) == {"<|end|>"}


def test_a_generation_prompt_that_was_not_asked_for_holds_no_stop() -> None:
    renderer = renderer_of(templates.ALWAYS_PROMPTS)
    assert stops_of(renderer) == {"<|end|>"}
    _, text = bridge_after(renderer, "42<|shut|><|end|>", {"role": "assistant", "content": "42"})
    assert text == "<|start|><|user|>And six times eight?<|shut|><|end|><|start|><|assistant|>"


@pytest.mark.parametrize("template", {each.family: each for each in corpus_templates()}.values(), ids=lambda t: t.name)
def test_no_stop_of_a_shipped_template_stands_inside_a_turn(template: Any) -> None:
    renderer = TemplateRenderer(template.tokenizer())
    stops = set(renderer.get_stop_token_ids())
    calls = [make_call(f"callprob{k}", "probe_one", {"value": f"Zw{k}"}) for k in range(2)]
    for reasoning in ("", "Zwr"):
        for num_calls in range(3):
            turn: Message = {"role": "assistant", "content": "Zwc"}
            if reasoning:
                turn["reasoning_content"] = reasoning
            if num_calls:
                turn["tool_calls"] = calls[:num_calls]
            try:
                prompt = renderer.render_text([QUESTION], tools=PROBE_TOOLS, add_generation_prompt=True)
                text = renderer.render_text([QUESTION, turn], tools=PROBE_TOOLS)
            except TemplateError:
                continue
            places = [text.rfind(each) for each in ("Zwr", "Zwc", "Zw0", "Zw1") if each in text]
            if not places or not text.startswith(prompt):
                continue
            inside = text[len(prompt) : max(places)]
            assert not stops & {
                renderer.facts.control_tokens.get_id(m.token) for m in renderer.facts.control_tokens.find(inside)
            }
