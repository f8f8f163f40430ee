"""Whether a run's model takes images: by what is asked for, by the data, and by what transformers has of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.served import save_tiny_model
from support.vision import save_vision_model
from support.vision_families import save_family
from unbroken.errors import InvalidInputError
from unbroken.runs.config import RendererConfig, RunConfig
from unbroken.runs.models import load_image_inputs, load_model
from unbroken.training.config import LoopConfig

pytest.importorskip("torchvision", reason="the image processors of transformers need it")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A text model; one that takes images and has no text class; one that has both."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "text": save_tiny_model(folder / "text"),
        "images": save_vision_model(folder / "images"),
        "both": save_family(folder / "both", "gemma3"),
    }


def config(images: bool | None = None, **renderer: Any) -> RunConfig:
    return RunConfig(
        output=Path("run"), loop=LoopConfig(num_steps=1), images=images, renderer=RendererConfig(**renderer)
    )


@pytest.mark.parametrize(
    ("model", "asked", "in_prompts", "takes"),
    [
        ("text", None, False, False),
        ("text", False, False, False),
        ("images", None, False, True),
        ("images", None, True, True),
        ("images", False, False, False),
        ("both", None, False, False),
        ("both", None, True, True),
        ("both", True, False, True),
    ],
)
def test_a_run_takes_images_if_it_must(models, model, asked, in_prompts, takes):
    found = load_image_inputs(models[model], config(asked), prompts_have_images=in_prompts)
    assert (found is not None) == takes
    assert load_model(models[model], takes_images=takes) is not None


@pytest.mark.parametrize(
    ("model", "asked", "in_prompts", "message"),
    [
        ("text", True, False, r"model must have an image processor with images = true, and '.*text' has none"),
        ("text", None, True, r"model must have an image processor for prompts with images, and '.*text' has none"),
        ("images", False, True, r"images must be true or left out for prompts with images, got false"),
    ],
)
def test_images_that_a_run_cannot_take_are_refused(models, model, asked, in_prompts, message):
    with pytest.raises(InvalidInputError, match=message):
        load_image_inputs(models[model], config(asked), prompts_have_images=in_prompts)


def test_a_processor_that_does_not_load_leaves_the_choice_of_text_alone(tmp_path, models):
    broken = tmp_path / "broken"
    shutil.copytree(models["images"], broken)
    (broken / "preprocessor_config.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"image processor of .* cannot be loaded: .* \(images = false trains"):
        load_image_inputs(broken, config(), prompts_have_images=False)
    assert load_image_inputs(broken, config(images=False), prompts_have_images=False) is None


def test_settings_of_images_are_those_of_the_processor(models):
    found = load_image_inputs(models["images"], config(image_settings={"max_pixels": 784}), prompts_have_images=True)
    assert found is not None
    assert found.settings == '{"max_pixels":784}'
    with pytest.raises(
        InvalidInputError, match=r"renderer.image_settings must be some of .*max_pixels.*, got \['max'\]"
    ):
        load_image_inputs(models["images"], config(image_settings={"max": 784}), prompts_have_images=True)
    with pytest.raises(InvalidInputError, match=r"renderer.image_settings must be left out without images, got"):
        load_image_inputs(models["text"], config(image_settings={"max_pixels": 784}), prompts_have_images=False)
