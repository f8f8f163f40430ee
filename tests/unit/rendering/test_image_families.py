"""Images with real processors of two families, and with the chat templates that TRL ships for image models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.corpus import corpus_template
from support.exact_bridges import is_exact
from support.image_corpus import CORPUS, TOOLS, call, corpus_renderer, result
from support.images import CountingProcessor, few_ids, said
from support.tokenizers import make_tokenizer
from support.vision import FAMILIES, PAD, TEMPLATE, load_processor, picture, save_vision_model
from unbroken.errors import ImageError, MessagesError, TemplateError
from unbroken.images.placeholders import collapse_spans
from unbroken.images.processor import ImageInputs
from unbroken.rendering.base import Bridge
from unbroken.rendering.loader import load_renderer
from unbroken.rendering.template import TemplateRenderer

TURN: Any = {"role": "assistant", "content": "Sure"}
CALL = call()
RESULT = result("it is", 3)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchvision")
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def shown(*parts: Any) -> list[Any]:
    """Parts of a message; numbers are pictures of that width."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": picture(part, 56)}
        for part in parts
    ]


def test_a_model_by_its_folder_renders_what_its_own_processor_makes_of_text_and_pictures(model: Path) -> None:
    renderer = load_renderer(model)
    messages: Any = [
        {"role": "user", "content": shown("left ", 56, " right", 112)},
        TURN,
        {"role": "tool", "content": shown("then", 84)},
    ]
    prompt = renderer.render(messages)
    processor = load_processor(model)
    text = processor.tokenizer.decode(collapse_spans(prompt.token_ids, prompt.images))
    pictures = [[picture(width, 56) for width in (56, 112, 84)]]
    expected = processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
    assert prompt.token_ids.tolist() == expected["input_ids"][0].tolist()
    assert len(prompt.images) == 3


def test_a_model_by_its_folder_bridges_images_as_it_renders_them(model: Path) -> None:
    renderer = load_renderer(model)
    first: Any = [{"role": "user", "content": shown(56, "what?", 112)}]
    new: Any = [{"role": "tool", "content": shown("see", 84)}, {"role": "user", "content": shown(56)}]
    prompt = renderer.render(first)
    sampled = make_sampled(load_processor(model).tokenizer)
    bridge = renderer.bridge_to_next_turn(prompt.token_ids, sampled, new, assistant=TURN, earlier=first)
    assert isinstance(bridge, Bridge)
    whole = renderer.render([*first, TURN, *new])
    assert np.concatenate([prompt.token_ids, sampled, bridge.bridge_ids]).tolist() == whole.token_ids.tolist()
    shift = len(prompt.token_ids) + len(sampled)
    assert [i.offset + shift for i in bridge.images] == [i.offset for i in whole.images[2:]]
    assert [i.image for i in bridge.images] == [i.image for i in whole.images[2:]]


def make_sampled(tokenizer: Any) -> Any:
    return np.array(tokenizer.encode("Sure<|im_end|>", add_special_tokens=False), dtype=np.int32)


def test_settings_change_the_ids_of_an_image_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    renderer: Any = load_renderer(save_vision_model(tmp_path))
    messages: Any = [{"role": "user", "content": shown(112, "a")}]
    (usual,) = renderer.render(messages).images
    (small,) = renderer.with_image_settings('{"max_pixels":784}').render(messages).images
    assert (usual.length, small.length) == (8, 1)
    (large,) = renderer.with_image_settings('{"min_pixels":12544}').render(messages).images
    assert large.length == 18
    with pytest.raises(ImageError, match=r"mm_processor_kwargs must be some of .*, got \['max_pixel'\]"):
        renderer.with_image_settings('{"max_pixel":784}').render(messages)


def test_a_model_whose_processor_cannot_be_loaded_is_one_of_text_and_says_so_when_there_is_an_image(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer(TEMPLATE, eos_token="<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    assert load_renderer(tmp_path).render([{"role": "user", "content": "a"}]).images == ()
    with pytest.raises(MessagesError, match="must not be an image: the model takes none"):
        load_renderer(tmp_path).render([said("user", 1)])
    (tmp_path / "preprocessor_config.json").write_text("{")
    renderer = load_renderer(tmp_path)
    assert renderer.render([{"role": "user", "content": "a"}]).images == ()
    with pytest.raises(MessagesError, match=r"must not be an image: the image processor of .* cannot be loaded"):
        renderer.render([said("user", 1)])


@pytest.mark.parametrize("name", CORPUS)
def test_a_shipped_template_writes_images_of_the_roles_it_knows_and_others_are_errors(name: str) -> None:
    renderer, tokenizer = corpus_renderer(name)
    placeholder, roles = CORPUS[name]
    conversations: dict[str, list[Any]] = {
        "user": [said("user", f"a {placeholder} ", 1, "b", 2)],
        "assistant": [said("user", "a"), said("assistant", "b", 1), said("user", "c", 2)],
        "tool": [said("user", "a", 2), CALL, RESULT],
    }
    for role, messages in conversations.items():
        if role not in roles:
            with pytest.raises(TemplateError):
                renderer.render(messages, tools=TOOLS)
            continue
        prompt = renderer.render(messages, tools=TOOLS)
        inside = np.concatenate([np.arange(image.offset, image.stop) for image in prompt.images])
        pads = np.flatnonzero(prompt.token_ids == tokenizer.convert_tokens_to_ids(placeholder))
        assert len(prompt.images) == 2
        assert pads.tolist() == inside.tolist()


def test_qwens_numbering_of_pictures_goes_on_in_a_bridge_where_it_is_turned_on() -> None:
    template = corpus_template("trl/qwen2_5_vl")
    tokenizer = template.tokenizer()
    images = ImageInputs(processor=CountingProcessor(tokenizer.convert_tokens_to_ids(PAD), num_ids=few_ids))
    renderer = TemplateRenderer(tokenizer, images=images, template_kwargs={"add_vision_id": True})
    first = [said("user", 1, "a")]
    prompt = renderer.render(first)
    assert "Picture 1: " in tokenizer.decode(prompt.token_ids)
    new = [said("user", 2, "b")]
    bridge = renderer.bridge_to_next_turn(prompt.token_ids, make_sampled(tokenizer), new, assistant=TURN, earlier=first)
    assert isinstance(bridge, Bridge)
    assert "Picture 2: " in tokenizer.decode(bridge.bridge_ids)
    assert is_exact(renderer, bridge, [*first, TURN, *new])
