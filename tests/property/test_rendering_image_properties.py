"""Any mix of text and images, in any role, with placeholders typed by anybody: rendered and bridged as one."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.conversations import WORDS
from support.effort import num_cases
from support.exact_bridges import is_exact
from support.image_corpus import CORPUS, TOOLS, call, corpus_renderer, result
from support.images import PAD, TEMPLATE, dot_file, few_ids, image_renderer, said
from unbroken.images.placeholders import collapse_spans, expand_placeholders
from unbroken.rendering.base import Bridge, Refusal
from unbroken.rendering.template import TemplateRenderer

IMAGES_FIRST = TEMPLATE.replace(
    "{%- for part in content or [] -%}",
    "{%- for part in (content | selectattr('type', 'equalto', 'image') | list) + "
    "(content | selectattr('type', 'equalto', 'text') | list) -%}",
)
TEMPLATES = {"in place": TEMPLATE, "images first": IMAGES_FIRST}
FORGERIES = (
    PAD,
    "<|image_pad|",
    "|image_pad|>",
    "<|vision_start|>",
    "image",
    "<|im_end|>",
    f"{PAD}{PAD}",
    "<tool_response>",
)
TEXTS = st.sampled_from((*WORDS, *FORGERIES)) | st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=8)
PARTS = st.lists(TEXTS | st.integers(0, 9), min_size=1, max_size=5)
CONTENTS = TEXTS | PARTS
LATER = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), CONTENTS), max_size=4)
NEW = st.lists(st.tuples(st.sampled_from(["user", "tool"]), CONTENTS), min_size=1, max_size=2)
TURN: Any = {"role": "assistant", "content": "Sure"}
SOME = settings(max_examples=num_cases(15, in_fuzz=300), derandomize=True, database=None)
MANY = settings(max_examples=num_cases(35, in_fuzz=700), derandomize=True, database=None)


@functools.cache
def renderer_of(name: str) -> tuple[TemplateRenderer, Any]:
    return image_renderer(TEMPLATES[name])


def message(role: str, content: Any) -> Any:
    return {"role": role, "content": content} if isinstance(content, str) else said(role, *content)


def conversation(later: list[tuple[str, Any]]) -> list[Any]:
    return [message("user", "a"), {"role": "assistant", "content": "b"}, *(message(*pair) for pair in later)]


def numbers_in(messages: list[Any]) -> list[tuple[int, Any]]:
    """Each image's message and file, in order."""
    return [
        (position, part["image"])
        for position, said_by in enumerate(messages)
        if isinstance(said_by["content"], list)
        for part in said_by["content"]
        if part["type"] == "image"
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@MANY
@given(later=LATER)
def test_i5_placeholders_stand_for_the_images_in_order_and_for_nothing_else(name: str, later: Any) -> None:
    renderer, tokenizer = renderer_of(name)
    messages = conversation(later)
    prompt = renderer.render(messages)
    expected = numbers_in(messages)
    assert [span.image for span in prompt.images] == [image for _, image in expected]
    assert [span.length for span in prompt.images] == [few_ids(image, "{}") for _, image in expected]
    inside = [k for span in prompt.images for k in range(span.offset, span.stop)]
    assert np.flatnonzero(prompt.token_ids == tokenizer.convert_tokens_to_ids(PAD)).tolist() == inside
    owners = [position for position, image in expected for _ in range(few_ids(image, "{}"))]
    assert prompt.message_indices[inside].tolist() == owners
    starts = np.count_nonzero(prompt.token_ids == tokenizer.convert_tokens_to_ids("<|vision_start|>"))
    assert starts == len(expected)


@pytest.mark.parametrize("name", TEMPLATES)
@MANY
@given(later=LATER)
def test_the_collapsed_prompt_is_the_text_that_transformers_writes(name: str, later: Any) -> None:
    renderer, tokenizer = renderer_of(name)
    messages = conversation(later)
    prompt = renderer.render(messages)
    collapsed = collapse_spans(prompt.token_ids, prompt.images)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(collapsed) == tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(collapsed) == len(prompt.token_ids) - sum(span.length - 1 for span in prompt.images)
    again, spans = expand_placeholders(collapsed, [span.image for span in prompt.images], renderer.images.processor)
    assert again.tolist() == prompt.token_ids.tolist()
    assert spans == prompt.images


@pytest.mark.parametrize("name", TEMPLATES)
@MANY
@given(later=LATER, new=NEW)
def test_i1_prompt_and_completion_and_bridge_are_the_whole_rendering_with_its_images(
    name: str, later: Any, new: Any
) -> None:
    renderer, tokenizer = renderer_of(name)
    before, added = conversation(later), [message(*pair) for pair in new]
    prompt = renderer.render(before)
    sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
    bridge = renderer.bridge_to_next_turn(prompt.token_ids, sampled, added, assistant=TURN, earlier=before)
    assert isinstance(bridge, Bridge)
    whole = renderer.render([*before, TURN, *added])
    start = len(prompt.token_ids) + len(sampled)
    assert [*prompt.token_ids.tolist(), *sampled.tolist(), *bridge.bridge_ids.tolist()] == whole.token_ids.tolist()
    spans = [(span.offset, span.length, span.image) for span in prompt.images]
    spans += [(span.offset + start, span.length, span.image) for span in bridge.images]
    assert spans == [(span.offset, span.length, span.image) for span in whole.images]
    shift = len(before) + 1
    found = [index + shift if index >= 0 else index for index in bridge.message_indices.tolist()]
    assert found == whole.message_indices[start:].tolist()


@pytest.mark.parametrize("name", CORPUS)
@SOME
@given(data=st.data())
def test_a_shipped_template_bridges_any_mix_as_it_writes_whole_conversations(name: str, data: st.DataObject) -> None:
    renderer, _ = corpus_renderer(name)
    placeholder, roles = CORPUS[name]
    text = st.sampled_from((*WORDS, placeholder, placeholder[:-1], "<tool_response>"))
    shown = st.lists(text | st.integers(0, 9), min_size=1, max_size=3)
    before = [said("user", *data.draw(shown))]
    for k in range(data.draw(st.integers(0, 2))):
        if "tool" in roles and data.draw(st.booleans()):
            before += [call(f"callx{k:04d}"), result(*data.draw(shown), call_id=f"callx{k:04d}")]
        before += [{"role": "assistant", "content": "so"}, said("user", *data.draw(shown))]
    has_call = data.draw(st.booleans())
    turn, new = (call(), result(*data.draw(shown))) if has_call else (TURN, said("user", *data.draw(shown)))
    end = np.array([min(renderer.facts.turn_end_ids)], dtype=np.int32)
    prompt = renderer.render(before, tools=TOOLS)
    bridge = renderer.bridge_to_next_turn(prompt.token_ids, end, [new], assistant=turn, tools=TOOLS, earlier=before)
    if has_call and "tool" not in roles:
        assert isinstance(bridge, Refusal)
        return
    assert isinstance(bridge, Bridge), bridge
    assert is_exact(renderer, bridge, [*before, turn, new], TOOLS)


def test_the_pictures_of_these_tests_are_of_several_sizes() -> None:
    assert len({few_ids(dot_file(seed), "{}") for seed in range(10)}) > 3
