"""More families of image-text models, tiny and random: embedded engine and trainer against the model's own processor,
which gets all images in one call."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.vision import load_processor, picture
from support.vision_engines import ask_with_images, load_vision_model, own_processor
from support.vision_families import FAMILIES, save_family
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import ImageError, InvalidInputError
from unbroken.images.decoder import encode_picture
from unbroken.images.processor import ProcessedImage, join_inputs
from unbroken.training.config import TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, SampleRequest, TrainingSample, token_ids

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

PICTURES = (picture(112, 56, seed=1), picture(56, 168, seed=2), picture(56, 56, seed=3))
BEFORE, AFTER = 5, 6
"""Ids around each image that no tokenizer would merge with it."""
NOT_EMBEDDED = {"gemma3", "qwen3_vl"}
"""Gemma 3's images see themselves in both directions, Qwen3-VL adds features in several layers (docs/vision.md)."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "smolvlm" and importlib.util.find_spec("num2words") is None:
        pytest.skip("SmolVLM's processor needs the package num2words")
    return save_family(tmp_path_factory.mktemp(request.param), request.param)


def ask(folder: Path, *, name: str = "a") -> SampleRequest:
    parts = [part for one in PICTURES for part in (BEFORE, encode_picture(one), AFTER)]
    return ask_with_images(own_processor(folder), *parts, 7, request_id=name, max_tokens=8)


def reference(folder: Path, completion: Any) -> tuple[list[int], np.ndarray]:
    """Prompt ids and the completion's logprobs, from the model's own processor and its plain forward pass."""
    processor, own = load_processor(folder), own_processor(folder)
    placeholder = processor.tokenizer.convert_ids_to_tokens(own.placeholder_id)
    separator = processor.tokenizer.decode([AFTER]) + processor.tokenizer.decode([BEFORE])
    shown = separator.join([placeholder] * len(PICTURES))
    text = f"{processor.tokenizer.decode([BEFORE])}{shown}{processor.tokenizer.decode([AFTER, 7])}"
    inputs = processor(
        text=[text],
        images=[list(PICTURES)],
        add_special_tokens=False,
        return_tensors="pt",
        **({"return_mm_token_type_ids": True} if "qwen" in type(processor).__name__.lower() else {}),
    )
    prompt = inputs.pop("input_ids")
    inputs.pop("attention_mask", None)
    ids = torch.cat([prompt, torch.tensor(np.asarray(completion)[None].astype(np.int64))], dim=1)
    for name in {"mm_token_type_ids", "token_type_ids"} & inputs.keys():
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(completion)))
    with torch.no_grad():
        logits_TV = load_vision_model(folder)(input_ids=ids, use_cache=False, **inputs).logits[0, :-1].float()
    logprobs = logits_TV.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return prompt[0].tolist(), logprobs[prompt.shape[1] - 1 :]


async def test_the_embedded_engine_samples_and_scores_several_images_of_different_tilings(folder: Path) -> None:
    model, config = load_vision_model(folder), TransformersEngineConfig(max_batch=4, context_length=1024)
    if model.config.model_type in NOT_EMBEDDED:
        with pytest.raises(InvalidInputError, match=f"{type(model).__name__} gives other logits"):
            TransformersEngine(model, config=config, image_processor=own_processor(folder))
        return
    engine = TransformersEngine(model, config=config, image_processor=own_processor(folder))
    request = ask(folder)
    (sequence,) = (await engine.sample(request)).sequences
    prompt, expected = reference(folder, sequence.completion_ids)
    assert request.prompt_ids.tolist() == prompt
    np.testing.assert_allclose(sequence.rollout_logprobs, expected, atol=1e-4, rtol=0)
    whole = token_ids(np.concatenate([request.prompt_ids, sequence.completion_ids]))
    scored = await engine.score(whole, images=request.images)
    np.testing.assert_allclose(scored.logprobs[len(prompt) - 1 :], expected, atol=1e-4, rtol=0)
    await engine.close()


def test_the_trainer_computes_the_logprobs_of_rows_with_images_of_different_tilings(folder: Path) -> None:
    request, completion = ask(folder), [8, 9, 10, 11]
    _, expected = reference(folder, completion)
    ids = token_ids([*request.prompt_ids.tolist(), *completion])
    sampled = np.arange(len(ids)) >= len(request.prompt_ids)
    row = TrainingSample(
        token_ids=ids,
        sampled_mask=sampled,
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, np.float32(-4), np.float32(np.nan)),
        policy_versions=np.where(sampled, 0, NO_VERSION).astype(np.int32),
        advantages=sampled.astype(np.float32),
        images=request.images,
    )
    trainer = Trainer(load_vision_model(folder), TrainerConfig(), images=own_processor(folder))
    for found in trainer.logprobs([row, row]):
        np.testing.assert_allclose(found[sampled], expected, atol=1e-4, rtol=0)
    trainer.step([row])


def test_sizes_that_nothing_would_tell_the_model_are_not_filled_up() -> None:
    images = [
        ProcessedImage(
            token_ids=token_ids([1]), token_types=token_ids([1]), inputs={"pixel_values": torch.ones(1, 3, side, 4)}
        )
        for side in (4, 8)
    ]
    with pytest.raises(ImageError, match="cannot be joined"):
        join_inputs(images)
    sized = [
        ProcessedImage(
            token_ids=one.token_ids,
            token_types=one.token_types,
            inputs={**one.inputs, "image_sizes": torch.tensor([[one.inputs["pixel_values"].shape[2], 4]])},
        )
        for one in images
    ]
    joined = join_inputs(sized)
    assert joined["pixel_values"].shape == (2, 3, 8, 4)
    assert joined["pixel_values"][0, :, 4:].abs().sum() == 0
