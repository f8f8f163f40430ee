"""Teachers of rows with images: the same ids and pixels as the policy, or a refusal with the setting that differs."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.gradients import SUBTRACT_GRADIENT
from support.image_rows import Vision
from support.image_servers import make_vision_app, vision_engine
from support.servers import listening
from support.vision import FAMILIES, picture, vision_tokenizer
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.images.processor import ImageInputs
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.runs.config import RunConfig, TeacherConfig
from unbroken.runs.python_files import ModelName
from unbroken.runs.teachers import open_teachers
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.training.config import LoopConfig, OldLogprobs, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.policy_gradient import ALGORITHMS
from unbroken.training.teachers import Teachers
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request, tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp(request.param) / "policy", request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp("qwen") / "policy", "qwen2_5_vl")


def copy_model(vision: Vision, name: str, **changes: Any) -> Path:
    """The same model in another folder, with other settings of its image processor."""
    folder = vision.folder.parent / name
    shutil.copytree(vision.folder, folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


async def open_one(stack: AsyncExitStack, vision: Vision, teacher: Path | str) -> Teachers:
    models = (ModelName(str(teacher)),)
    config = RunConfig(
        output=vision.folder.parent / "run", loop=LoopConfig(num_steps=1), teacher=TeacherConfig(models=models)
    )
    found = await open_teachers(
        stack, config, vision.folder, context_length=4096, images=ImageInputs(processor=vision.images)
    )
    assert found is not None
    return found


def make_trainer(vision: Vision, teachers: Teachers, **changes: Any) -> Trainer:
    config = TrainerConfig(optimizer=SUBTRACT_GRADIENT, teacher_weight=1.0, **changes)
    return Trainer(
        vision.model(), config, objective=ALGORITHMS["distillation"], teachers=teachers, images=vision.images
    )


def rows_of(vision: Vision, trainer: Trainer) -> list[TrainingSample]:
    """Rows as the own weights would have sampled them: with one picture, with two in two turns, and without any."""
    first, second = tuple(vision.encode("Noise." + END)), tuple(vision.encode("Yes." + END))
    rows = [
        vision.row(USER, picture(56, 84, seed=2), "What is this?", ASSISTANT, first),
        vision.row(USER, picture(28, 28, seed=3), ASSISTANT, first, USER, picture(112, 56, seed=1), ASSISTANT, second),
        vision.row(USER, "What is a tool?", ASSISTANT, second),
    ]
    return [replace(row, rollout_logprobs=own) for row, own in zip(rows, trainer.logprobs(rows), strict=True)]


# Numerics are fast with images: equal bits are those of equal passes, in which both sides are computed.
async def test_the_policy_itself_is_at_no_distance_from_itself_with_images(vision):
    async with AsyncExitStack() as stack:
        trainer = make_trainer(
            vision, await open_one(stack, vision, copy_model(vision, "itself")), old_logprobs=OldLogprobs.RECOMPUTE
        )
        rows = rows_of(vision, trainer)
        metrics = step_metrics(trainer.step(rows))
        assert metrics["teacher/kl"] == metrics["teacher/worse_share"] == 0
        assert metrics["teacher/token_share"] == 1


async def test_an_adapter_sees_the_pictures_too(qwen):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(qwen.model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True))
    adapted.save_pretrained(qwen.folder.parent / "adapter")
    async with AsyncExitStack() as stack:
        trainer = make_trainer(
            qwen, await open_one(stack, qwen, qwen.folder.parent / "adapter"), old_logprobs=OldLogprobs.RECOMPUTE
        )
        assert step_metrics(trainer.step(rows_of(qwen, trainer)))["teacher/kl"] == 0


async def test_a_server_sees_the_same_pictures(qwen):
    engine = TransformersEngine(qwen.model(), image_processor=qwen.images)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening(make_vision_app(engine, images=qwen.images)))
        trainer = make_trainer(qwen, await open_one(stack, qwen, url))
        rows = rows_of(qwen, trainer)
        assert abs(step_metrics(await asyncio.to_thread(trainer.step, rows))["teacher/kl"]) < 1e-6


async def test_a_teacher_that_would_see_other_pictures_or_none_is_refused_by_name(qwen):
    other = copy_model(qwen, "other", image_mean=[0.4, 0.5, 0.5])
    blind = copy_model(qwen, "blind")
    (blind / "preprocessor_config.json").unlink()
    text = copy_model(qwen, "text")
    config = json.loads((text / "config.json").read_text())
    text_config = {**config["text_config"], "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (text / "config.json").write_text(json.dumps(text_config))
    for folder, words in (
        (other, r"'.*other' has image_processor\.image_mean \[0\.4, .* where the policy has \[0\.5"),
        (blind, "'.*blind' takes no images"),
        (text, "'.*text' takes no images"),
    ):
        async with AsyncExitStack() as stack:
            with pytest.raises(InvalidInputError, match="must have the policy's image processor, and " + words):
                await open_one(stack, qwen, folder)


async def test_so_is_a_server(qwen):
    other = Vision.load(copy_model(qwen, "smaller", merge_size=1), "qwen2_5_vl").images
    async with listening(make_vision_app(vision_engine(), images=other)) as url, AsyncExitStack() as stack:
        with pytest.raises(
            InvalidInputError, match=rf"'{url}' has image_processor\.merge_size 1 where the policy has 2"
        ):
            await open_one(stack, qwen, url)
    text = create_app(
        vision_engine(),
        lambda options: TemplateRenderer(vision_tokenizer(), template_kwargs=options),
        TextCodec(vision_tokenizer()),
        ServerConfig(model_name="text"),
    )
    async with listening(text) as url, AsyncExitStack() as stack:
        with pytest.raises(InvalidInputError, match=rf"'{url}' takes no images, or does not say how"):
            await open_one(stack, qwen, url)
