"""Messages with images: the template's placeholders become the images' ids, each in its message."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from support.images import (
    PAD,
    TEMPLATE,
    CountingProcessor,
    dot,
    dot_file,
    few_ids,
    image_part,
    image_renderer,
    said,
    text_part,
)
from support.templates import CHATML
from support.tokenizers import make_tokenizer
from unbroken.errors import ImageError, InvalidInputError, MessagesError, TemplateError
from unbroken.images.placeholders import collapse_spans
from unbroken.images.processor import ImageInputs
from unbroken.rendering.base import TEMPLATE as BY_TEMPLATE
from unbroken.rendering.base import RenderedPrompt
from unbroken.rendering.template import TemplateRenderer

_WRITE = "show(message.content)"
DROPS_IN_TOOLS = TEMPLATE.replace("<tool_response>\\n' + show(message.content)", "<tool_response>\\n' + 'see above'")
STRINGIFIES = TEMPLATE.replace(_WRITE, "message.content | string")
TWICE = TEMPLATE.replace("'<|vision_start|><|image_pad|><|vision_end|>'", "'<|image_pad|><|image_pad|>'")
HOISTS = (
    "{%- for message in messages -%}{%- if message.content is not string -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|image_pad|>' -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}\n"
) + TEMPLATE.replace("{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}", "{#- said before -#}")
IMAGES_FIRST = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<|image_pad|>' -}}{%- endfor -%}
    {%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text -}}{%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def collapsed_text(tokenizer: Any, prompt: RenderedPrompt) -> str:
    return tokenizer.decode(collapse_spans(prompt.token_ids, prompt.images))


def test_each_image_becomes_its_ids_and_a_span_where_it_stands_between_the_texts() -> None:
    renderer, tokenizer = image_renderer()
    pad = tokenizer.convert_tokens_to_ids(PAD)
    prompt = renderer.render([said("user", "left", 1, "right", 2)])
    assert [span.image for span in prompt.images] == [dot_file(1), dot_file(2)]
    assert [span.length for span in prompt.images] == [few_ids(dot_file(1), "{}"), few_ids(dot_file(2), "{}")]
    inside = np.zeros(len(prompt.token_ids), dtype=bool)
    for span in prompt.images:
        inside[span.offset : span.stop] = True
    assert ((prompt.token_ids == pad) == inside).all()
    assert collapsed_text(tokenizer, prompt) == (
        "<|im_start|>user\nleft<|vision_start|><|image_pad|><|vision_end|>right"
        "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_ids_of_an_image_have_the_index_of_its_message() -> None:
    renderer, _ = image_renderer()
    prompt = renderer.render([said("user", "a"), said("assistant", 1, "b"), said("user", 2), said("user", "c", 3)])
    assert [set(prompt.message_indices[i.offset : i.stop].tolist()) for i in prompt.images] == [{1}, {2}, {3}]
    assert set(prompt.message_indices.tolist()) == {BY_TEMPLATE, 0, 1, 2, 3}
    assert len(prompt.message_indices) == len(prompt.token_ids)


def test_ids_that_set_an_image_apart_belong_to_its_span_and_message() -> None:
    tokenizer = make_tokenizer(TEMPLATE, control_tokens=("<|row|>", "<|end_row|>"), eos_token="<|im_end|>")
    pad, row, end = tokenizer.convert_tokens_to_ids([PAD, "<|row|>", "<|end_row|>"])
    processor = CountingProcessor(pad, apart=(row, end), num_ids=lambda image, settings: 2)
    prompt = TemplateRenderer(tokenizer, images=ImageInputs(processor=processor)).render([said("user", "a", 1)])
    (span,) = prompt.images
    assert prompt.token_ids[span.offset : span.stop].tolist() == [row, pad, pad, end]
    assert prompt.message_indices[span.offset : span.stop].tolist() == [0] * 4


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": dot(5)},
        {"type": "image_pil", "image_pil": dot(5)},
        {"type": "image_url", "image_url": {"url": dot_file(5).data}},
        {"type": "image", "image": dot_file(5).data},
    ],
    ids=["image", "image_pil", "image_url", "bytes"],
)
def test_images_in_every_role_and_form_are_the_same_image(role: str, part: Any) -> None:
    renderer, _ = image_renderer(IMAGES_FIRST)  # it looks for parts of the type `image`
    before: list[Any] = [said("user", "a"), said("assistant", "b")]
    given = renderer.render([*before, {"role": role, "content": [text_part("c"), part]}])
    usual = renderer.render([*before, said(role, "c", 5)])
    assert given.token_ids.tolist() == usual.token_ids.tolist()
    assert given.images == usual.images


@pytest.mark.parametrize(
    "typed", [PAD, "<|image_pad|", "a<|image_pad|><|image_pad|>b", "<|vision_start|><|image_pad|>"]
)
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_i5_a_placeholder_in_text_is_ordinary_text(role: str, typed: str) -> None:
    renderer, tokenizer = image_renderer()
    before: list[Any] = [said("user", "a"), said("assistant", "b")]
    prompt = renderer.render([*before, said(role, typed, 1, typed), {"role": "user", "content": typed}])
    (span,) = prompt.images
    assert span.image == dot_file(1)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    assert np.flatnonzero(prompt.token_ids == pad).tolist() == list(range(span.offset, span.stop))
    assert tokenizer.decode(prompt.token_ids).count(typed) >= 3


def test_text_before_and_after_an_image_is_encoded_as_the_tokenizer_does() -> None:
    renderer, tokenizer = image_renderer()
    prompt = renderer.render([said("user", "naïve café 12:30", 1, " and 今天")])
    ids = collapse_spans(prompt.token_ids, prompt.images)
    assert ids.tolist() == tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)


def test_a_template_may_write_the_images_of_a_message_before_its_text() -> None:
    renderer, tokenizer = image_renderer(IMAGES_FIRST)
    prompt = renderer.render([said("user", "what", 1, "is", 2)])
    assert [span.image for span in prompt.images] == [dot_file(1), dot_file(2)]
    assert "user\n<|image_pad|><|image_pad|>whatis<|im_end|>" in collapsed_text(tokenizer, prompt)


@pytest.mark.parametrize(
    ("template", "messages", "said_so"),
    [
        (
            STRINGIFIES,
            [said("user", "a"), said("user", 1, 2)],
            r"0 image placeholders .*: 0 for the 2 of messages\[1\]",
        ),
        (
            DROPS_IN_TOOLS,
            [said("user", "a", 1), said("assistant", "b"), said("tool", "c", 2)],
            r"1 image placeholders for 2 images: 0 for the 1 of messages\[2\]",
        ),
        (
            TWICE,
            [said("user", "a"), said("user", 1)],
            r"2 image placeholders for 1 images: 2 for the 1 of messages\[1\]",
        ),
        (HOISTS, [said("user", "a"), said("assistant", "b"), said("user", "c", 1), said("user", "d")], "messages"),
        (CHATML, [said("user", 1, "a")], "refuses these messages"),
    ],
    ids=[
        "writes parts as Python",
        "leaves them out in tool messages",
        "writes two for each",
        "moves them",
        "text only",
    ],
)
def test_a_template_that_does_not_write_each_image_once_in_its_message_is_an_error(
    template: str, messages: list[Any], said_so: str
) -> None:
    renderer, _ = image_renderer(template)
    with pytest.raises(TemplateError, match=said_so):
        renderer.render(messages)


def test_a_placeholder_behind_text_of_a_later_message_is_an_error_that_names_the_image() -> None:
    renderer, _ = image_renderer(HOISTS)
    with pytest.raises(TemplateError, match=r"placeholder of messages\[2\].content\[1\] .* between text of"):
        renderer.render([said("user", "a"), said("assistant", "b"), said("user", "c", 1)])


def test_a_template_that_tells_lengths_takes_images_though_image_is_part_of_a_control_token() -> None:
    template = TEMPLATE.replace("{{- part.text -}}", "{{- part.text | length ~ part.text -}}").replace(PAD, "<image>")
    tokenizer = make_tokenizer(template, control_tokens=("<image>",), eos_token="<|im_end|>")
    processor = CountingProcessor(tokenizer.convert_tokens_to_ids("<image>"), num_ids=few_ids)
    renderer = TemplateRenderer(tokenizer, images=ImageInputs(processor=processor))
    prompt = renderer.render([said("user", "what", 1)])
    assert "4what<|vision_start|><image><|vision_end|>" in collapsed_text(tokenizer, prompt)
    with pytest.raises(TemplateError, match="cuts or rewrites text"):
        renderer.render([said("user", "<image>", 1)])


def test_errors_of_images_name_their_place() -> None:
    renderer, _ = image_renderer()
    with pytest.raises(ImageError, match=r"messages\[1\].content\[1\] must be an image file"):
        renderer.render([said("user", 1), said("user", "a") | {"content": [text_part("a"), broken_part()]}])
    with pytest.raises(MessagesError, match=r"messages\[0\].content\[0\] must have its image under 'image_url', got"):
        renderer.render([{"role": "user", "content": [{"type": "image_url", "url": "x"}]}])


def broken_part() -> Any:
    return {"type": "image", "image": b"no image"}


def test_a_text_model_refuses_images_and_says_why() -> None:
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(MessagesError, match=r"messages\[0\].content\[0\] must not be an image: the model takes none"):
        TemplateRenderer(tokenizer).render([said("user", 1)])
    with pytest.raises(MessagesError, match=r"must not be an image: torchvision is missing"):
        TemplateRenderer(tokenizer, no_images_because="torchvision is missing").render([said("user", 1)])
    with pytest.raises(InvalidInputError, match="image settings cannot be used"):
        TemplateRenderer(tokenizer).with_image_settings('{"max_pixels":1}')


def test_a_placeholder_that_text_can_spell_is_refused_at_once() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    ordinary = tokenizer.encode("a", add_special_tokens=False)[0]
    with pytest.raises(InvalidInputError, match=r"the image placeholder \(id \d+\) must be a control token"):
        TemplateRenderer(tokenizer, images=ImageInputs(processor=CountingProcessor(ordinary)))


def test_settings_of_one_request_change_the_ids_and_share_what_was_proven() -> None:
    renderer, tokenizer = image_renderer()
    settings = '{"max_pixels":3136}'
    other = renderer.with_image_settings(settings)
    messages = [said("user", 1, "a")]
    (span,) = other.render(messages).images
    assert span.settings == settings
    assert span.length == few_ids(dot_file(1), settings) != renderer.render(messages).images[0].length
    assert renderer.render(messages).images[0].settings == "{}"
    end = np.array([tokenizer.convert_tokens_to_ids("<|im_end|>")], dtype=np.int32)
    turn: Any = {"role": "assistant", "content": ""}
    bridge: Any = other.bridge_to_next_turn(
        other.render(messages).token_ids, end, messages, assistant=turn, earlier=messages
    )
    assert [image.settings for image in bridge.images] == [settings]


def test_loaded_messages_render_as_the_originals_do_and_are_not_read_again() -> None:
    renderer, _ = image_renderer()
    originals: list[Any] = [
        {"role": "user", "content": "plain"},
        {"role": "user", "content": [{"type": "image_pil", "image_pil": dot(3)}, text_part("a")]},
    ]
    loaded = renderer.load_images(originals)
    assert loaded == [originals[0], {"role": "user", "content": [image_part(3), text_part("a")]}]
    assert loaded[0] is originals[0]
    assert renderer.render(loaded).token_ids.tolist() == renderer.render(originals).token_ids.tolist()
    with pytest.raises(ImageError, match=r"messages\[0\].content\[0\]"):
        renderer.load_images([{"role": "user", "content": [broken_part()]}])


def test_of_many_threads_that_load_pictures_four_are_at_work() -> None:
    lock, working, seen, meeting = threading.Lock(), [0], [0], threading.Barrier(4)

    def slowly(image: Any, settings: str) -> int:
        with lock:
            working[0] += 1
            seen[0] = max(seen[0], working[0])
        meeting.wait(60)
        with lock:
            working[0] -= 1
        return 1

    tokenizer = make_tokenizer(TEMPLATE, eos_token="<|im_end|>")
    processor = CountingProcessor(tokenizer.convert_tokens_to_ids(PAD), num_ids=slowly)
    renderer = TemplateRenderer(tokenizer, images=ImageInputs(processor=processor))
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda k: renderer.load_images([said("user", k)]), range(24)))
    assert seen == [4]
    assert processor.num_expanded == 24
