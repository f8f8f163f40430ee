"""Bridges with images: what a window shows of them is every history's, and what is not is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.exact_bridges import is_exact
from support.images import PAD, TEMPLATE, dot_file, few_ids, image_renderer, said, text_part
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing, HistoryEffect, Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer

TURN: Any = {"role": "assistant", "content": "Sure"}
CALL: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
}
_IMAGE = "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
NUMBERED = TEMPLATE.replace(
    _IMAGE, "{%- set ns.n = ns.n + 1 -%}{{- 'Picture ' ~ ns.n ~ ': <|vision_start|><|image_pad|><|vision_end|>' -}}"
)
NUMBERED = "{%- set ns = namespace(n=0) -%}\n" + NUMBERED
TELLS_OF_IMAGES = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}",
    "{%- set ns = namespace(sees='') -%}{%- for m in messages if m.content is not string -%}"
    "{%- set ns.sees = ' (sees)' -%}{%- endfor -%}{{- '<|im_start|>assistant' + ns.sees + '\\n' }}\n{%- endif %}",
)
ONLY_LAST = TEMPLATE.replace(
    "+ show(message.content) }}",
    "+ (show(message.content) if loop.last or message.content is string else "
    "message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join) }}",
)
NOT_IN_TOOLS = TEMPLATE.replace("<tool_response>\\n' + show(message.content)", "<tool_response>\\n' + 'see above'")
TO_FRONT = TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- for m in messages if m.content is not string -%}{%- for part in m.content if part.type == 'image' -%}"
    "{{- '<|image_pad|>' -}}{%- endfor -%}{%- endfor -%}\n{%- for message in messages %}",
).replace(_IMAGE, "{#- at the front -#}")
FIRST_RESULT = TEMPLATE.replace(
    "{{- '<|im_start|>user\\n<tool_response>",
    "{{- '<|im_start|>user' + (' (first)' if messages[:loop.index0] | selectattr('role', 'equalto', 'tool') | list "
    "| length == 0 else '') + '\\n<tool_response>",
)


def bridge(
    renderer: TemplateRenderer, tokenizer: Any, new: list[Any], *, turn: Any = TURN, end: str = "<|im_end|>"
) -> BridgeOutcome:
    prompt_ids = renderer.render([said("user", "a")]).token_ids
    sampled = tokenizer.encode(f"Sure{end}", add_special_tokens=False)
    return renderer.bridge_to_next_turn(
        prompt_ids, np.array(sampled, dtype=np.int32), new, assistant=turn, earlier=[said("user", "a")]
    )


def check_against_rendering(
    renderer: TemplateRenderer, before: list[Any], new: list[Any], turn: Any, found: Any
) -> None:
    """The end of a fresh rendering is the bridge, ids, indices and images."""
    assert isinstance(found, Bridge), found
    whole = renderer.render([*before, turn, *new])
    start = len(whole.token_ids) - len(found.bridge_ids)
    assert whole.token_ids[start:].tolist() == found.bridge_ids.tolist()
    shifted = [i - len(before) - 1 if i > len(before) else -1 for i in whole.message_indices[start:].tolist()]
    assert shifted == found.message_indices.tolist()
    late = [span for span in whole.images if span.offset >= start]
    assert [(i.offset - start, i.length, i.image, i.settings) for i in late] == [
        (i.offset, i.length, i.image, i.settings) for i in found.images
    ]


@pytest.mark.parametrize(
    ("new", "turn"),
    [
        ([said("user", 1, "what is it?")], TURN),
        ([said("user", "this", 1, "or", 2, "?")], TURN),
        ([said("user", 1)], TURN),
        ([said("user", 1, 1, 1)], TURN),
        ([said("tool", "found", 1, tool_call_id="c1", name="look")], CALL),
        ([said("tool", 1, tool_call_id="c1", name="look"), said("user", "and", 2)], CALL),
        ([said("tool", 1, tool_call_id="c1"), {"role": "user", "content": "see?"}], CALL),
        ([{"role": "user", "content": f"typed {PAD}"}], TURN),
        ([said("user", PAD, 1, f"{PAD}{PAD}")], TURN),
    ],
)
@pytest.mark.parametrize("before", [[said("user", "a")], [said("user", 7, "a", 8), TURN, said("user", 9)]])
def test_i1_a_bridge_with_images_is_the_end_of_a_fresh_rendering(before: list[Any], new: list[Any], turn: Any) -> None:
    renderer, tokenizer = image_renderer()
    check_against_rendering(renderer, before, new, turn, bridge(renderer, tokenizer, new, turn=turn))


def test_offsets_of_images_count_from_the_first_id_of_the_bridge_also_where_a_cut_turn_is_closed() -> None:
    renderer, tokenizer = image_renderer()
    pad = tokenizer.convert_tokens_to_ids(PAD)
    for end, closing in (("<|im_end|>", Closing.NONE), ("", Closing.TRUNCATED)):
        found = bridge(renderer, tokenizer, [said("user", "b", 1)], end=end)
        assert isinstance(found, Bridge)
        assert found.closing is closing
        (span,) = found.images
        assert np.flatnonzero(found.bridge_ids == pad).tolist() == list(range(span.offset, span.stop))
        assert set(found.message_indices[span.offset : span.stop].tolist()) == {0}


def test_i1_pictures_that_are_numbered_through_the_conversation_and_text_that_tells_of_them_are_bridged() -> None:
    before = [said("user", 1, "a"), TURN, said("user", 2, 3)]
    for template in (NUMBERED, TELLS_OF_IMAGES):
        renderer, tokenizer = image_renderer(template)
        sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
        prompt_ids = renderer.render(before).token_ids
        for new in ([said("user", 4, "b")], [{"role": "user", "content": "b"}]):
            found = renderer.bridge_to_next_turn(prompt_ids, sampled, new, assistant=TURN, earlier=before)
            check_against_rendering(renderer, before, new, TURN, found)


@pytest.mark.parametrize(
    ("template", "new", "turn", "reason"),
    [
        (NOT_IN_TOOLS, [said("tool", 1, tool_call_id="c1", name="look")], CALL, RefusalReason.DROPS_MESSAGE),
        (TO_FRONT, [said("user", 1, "x")], TURN, RefusalReason.DROPS_MESSAGE),
    ],
    ids=["leaves images out of tool messages", "writes all images at the front"],
)
def test_images_that_are_left_out_or_moved_are_refused(
    template: str, new: list[Any], turn: Any, reason: RefusalReason
) -> None:
    renderer, tokenizer = image_renderer(template)
    found = bridge(renderer, tokenizer, new, turn=turn)
    assert isinstance(found, Refusal)
    assert found.reason is reason


def test_an_image_in_a_result_makes_a_history_one_with_results() -> None:
    renderer, tokenizer = image_renderer(FIRST_RESULT)
    answer = said("tool", "found", 1, tool_call_id="c1", name="look")
    sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
    question = [said("user", "a", 2)]
    for before in (question, [*question, CALL, answer]):
        prompt_ids = renderer.render(before).token_ids
        found = renderer.bridge_to_next_turn(prompt_ids, sampled, [answer], assistant=CALL, earlier=before)
        check_against_rendering(renderer, before, [answer], CALL, found)


def test_a_template_that_forgets_earlier_images_rewrites_history() -> None:
    renderer, tokenizer = image_renderer(ONLY_LAST)
    sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
    for before, effect in (
        ([said("user", 2, "a")], HistoryEffect.REWRITTEN),
        ([said("user", "a")], HistoryEffect.KEPT),
    ):
        prompt_ids = renderer.render(before).token_ids
        found = renderer.bridge_to_next_turn(
            prompt_ids, sampled, [said("user", 1, "x")], assistant=TURN, earlier=before
        )
        assert isinstance(found, Bridge)
        assert found.history is effect


def test_a_broken_image_and_one_in_the_sampled_turn_are_refused_with_their_place() -> None:
    renderer, tokenizer = image_renderer()
    broken = {"role": "user", "content": [text_part("a"), {"type": "image", "image": b"none"}]}
    found = bridge(renderer, tokenizer, [said("user", "a"), broken])
    assert isinstance(found, Refusal)
    assert found.reason is RefusalReason.BAD_EXTENSION
    assert "new messages[1].content[1] must be an image file" in found.detail
    found = bridge(renderer, tokenizer, [said("user", "a")], turn=said("assistant", 1))
    assert isinstance(found, Refusal)
    assert found.reason is RefusalReason.BAD_EXTENSION


def test_a_bridge_does_not_look_at_images_of_the_history() -> None:
    renderer, tokenizer = image_renderer()
    before = [said("user", k, "x") for k in range(50)]
    prompt = renderer.render(before)
    sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
    new = [said("user", 99, "y")]
    renderer.bridge_to_next_turn(prompt.token_ids, sampled, new, assistant=TURN, earlier=before)
    assert renderer.images is not None
    processor: Any = renderer.images.processor
    num_before = processor.num_expanded
    found = renderer.bridge_to_next_turn(prompt.token_ids, sampled, new, assistant=TURN, earlier=before)
    assert processor.num_expanded == num_before + 1
    check_against_rendering(renderer, before, new, TURN, found)


def test_the_judge_tells_a_bridge_with_another_image_from_the_right_one() -> None:
    renderer, tokenizer = image_renderer()
    large = dot_file(0)
    small = next(dot_file(k) for k in range(1, 99) if few_ids(dot_file(k), "{}") != few_ids(large, "{}"))
    same = next(dot_file(k) for k in range(1, 99) if few_ids(dot_file(k), "{}") == few_ids(large, "{}"))
    for image in (large, small, same):
        new: Any = [{"role": "user", "content": [{"type": "image", "image": image}, text_part("b")]}]
        found = bridge(renderer, tokenizer, new)
        assert isinstance(found, Bridge)
        shown: Any = {"role": "user", "content": [{"type": "image", "image": large}, text_part("b")]}
        assert is_exact(renderer, found, [said("user", 5), TURN, shown]) is (image == large)
