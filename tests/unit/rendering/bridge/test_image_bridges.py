"""Bridges with images: what a window shows of them is every history's, and what is not is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.images import PAD, TEMPLATE, dot_file, few_ids, image_part, image_renderer, said, text_part
from support.tokenizers import make_tokenizer
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing, HistoryEffect, Refusal, RefusalReason
from unbroken.rendering.bridge.shadow_audit import AuditOutcome, UsedBridge, audit_bridge
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
SWAPPED = TEMPLATE.replace(
    "show(message.content) }}",
    "(show(message.content) if message.content is string or loop.last else '') + "
    "(show(messages[loop.index0 - 1].content) if not loop.first and messages[loop.index0 - 1].content is not string "
    "else '') }}",
)
"""Writes the parts of a message behind the text of the next one."""


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


def test_pictures_that_are_numbered_through_the_conversation_are_refused() -> None:
    renderer, tokenizer = image_renderer(NUMBERED)
    found = bridge(renderer, tokenizer, [said("user", 1, "b")])
    assert isinstance(found, Refusal)
    assert found.reason is RefusalReason.HISTORY_DEPENDENT
    check_against_rendering(
        renderer, [said("user", 1)], [said("user", "b")], TURN, bridge(renderer, tokenizer, [said("user", "b")])
    )


def test_text_after_a_turn_that_tells_of_images_in_the_history_is_refused_but_not_for_a_text_model() -> None:
    renderer, tokenizer = image_renderer(TELLS_OF_IMAGES)
    found = bridge(renderer, tokenizer, [{"role": "user", "content": "b"}])
    assert isinstance(found, Refusal)
    assert found.reason is RefusalReason.HISTORY_DEPENDENT
    text_model = TemplateRenderer(make_tokenizer(TELLS_OF_IMAGES, eos_token="<|im_end|>"))
    question: Any = {"role": "user", "content": "a"}
    sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
    prompt_ids = text_model.render([question]).token_ids
    assert isinstance(text_model.bridge_to_next_turn(prompt_ids, sampled, [question], assistant=TURN), Bridge)


@pytest.mark.parametrize(
    ("template", "new", "turn", "reason"),
    [
        (NOT_IN_TOOLS, [said("tool", 1, tool_call_id="c1", name="look")], CALL, RefusalReason.DROPS_MESSAGE),
        (TO_FRONT, [said("user", 1, "x")], TURN, RefusalReason.REORDERS_TURN),
        (SWAPPED, [said("user", 1), said("user", "x")], TURN, RefusalReason.DROPS_MESSAGE),
    ],
    ids=["leaves images out of tool messages", "writes all images at the front", "writes an image in the next message"],
)
def test_images_that_are_left_out_or_moved_are_refused(
    template: str, new: list[Any], turn: Any, reason: RefusalReason
) -> None:
    renderer, tokenizer = image_renderer(template)
    found = bridge(renderer, tokenizer, new, turn=turn)
    assert isinstance(found, Refusal)
    assert found.reason is reason
    assert found in [record.outcome for record in renderer.certificates()]


def test_an_image_in_a_result_makes_a_history_one_with_results() -> None:
    renderer, tokenizer = image_renderer(FIRST_RESULT)
    answer = said("tool", "found", 1, tool_call_id="c1", name="look")
    sampled = np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)
    question = [said("user", "a", 2)]
    for before in (question, [*question, CALL, answer]):
        prompt_ids = renderer.render(before).token_ids
        found = renderer.bridge_to_next_turn(prompt_ids, sampled, [answer], assistant=CALL, earlier=before)
        check_against_rendering(renderer, before, [answer], CALL, found)
    unknown = renderer.bridge_to_next_turn(prompt_ids, sampled, [answer], assistant=CALL)
    assert isinstance(unknown, Refusal)
    assert unknown.reason is RefusalReason.HISTORY_DEPENDENT


def test_a_template_that_forgets_earlier_images_rewrites_history() -> None:
    renderer, tokenizer = image_renderer(ONLY_LAST)
    found = bridge(renderer, tokenizer, [said("user", 1, "x")])
    assert isinstance(found, Bridge)
    assert found.history is HistoryEffect.REWRITTEN


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


def test_each_structure_of_parts_is_proven_once_whatever_its_texts_and_images_are() -> None:
    renderer, tokenizer = image_renderer()
    for k in range(3):
        bridge(renderer, tokenizer, [said("user", k, f"text {k}")])
    assert [str(record.shape) for record in renderer.certificates()] == ["text; then user of image, text"]
    bridge(renderer, tokenizer, [said("user", "text", 1)])
    bridge(renderer, tokenizer, [said("user", "one", "two")])
    assert [str(record.shape) for record in renderer.certificates()][1:] == [
        "text; then user of text, image",
        "text; then user",
    ]


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


def test_an_audit_finds_a_bridge_with_another_image_and_confirms_the_right_one() -> None:
    renderer, tokenizer = image_renderer()
    large = dot_file(0)
    small = next(dot_file(k) for k in range(1, 99) if few_ids(dot_file(k), "{}") != few_ids(large, "{}"))
    same = next(dot_file(k) for k in range(1, 99) if few_ids(dot_file(k), "{}") == few_ids(large, "{}"))
    new = [{"role": "user", "content": [{"type": "image", "image": large}, text_part("b")]}]
    found = bridge(renderer, tokenizer, new)
    assert isinstance(found, Bridge)
    messages: list[Any] = [said("user", 5), TURN, *new]
    right = UsedBridge(bridge=found, messages=messages, num_new=1)
    assert audit_bridge(renderer, right).outcome is AuditOutcome.MATCH
    for other in (small, same):
        message: Any = {"role": "user", "content": [{"type": "image", "image": other}, text_part("b")]}
        wrong = UsedBridge(bridge=found, messages=[*messages[:-1], message], num_new=1)
        assert audit_bridge(renderer, wrong).outcome is AuditOutcome.MISMATCH


def test_a_revoked_kind_of_images_is_not_bridged_again_and_others_are() -> None:
    renderer, tokenizer = image_renderer()
    new = [{"role": "user", "content": [image_part(1), text_part("b")]}]
    renderer.revoke_bridge(new, assistant=TURN, detail="wrong")
    found = bridge(renderer, tokenizer, [said("user", 2, "c")])
    assert isinstance(found, Refusal)
    assert found.reason is RefusalReason.FAILED_AUDIT
    assert isinstance(bridge(renderer, tokenizer, [said("user", "c", 2)]), Bridge)
