"""Images in vLLM: what it computes for them, what is refused, and that others are unharmed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from safetensors.torch import load_file

from support.vision import save_vision_model
from support.vision_engines import (
    CONTEXT_LENGTH,
    MAX_IMAGES,
    ask_with_images,
    image_file,
    load_vision_model,
    model_logprobs,
)
from unbroken.errors import ContextOverflowError, EchoError, ImageError, SamplingError
from unbroken.types import EncodedImage, FinishReason, ImageSpan, SampleChunk, SampleRequest, image_settings, token_ids

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("vllm"),
    pytest.mark.filterwarnings("ignore:Passing .min_pixels. and .max_pixels. to a processor call:FutureWarning"),
]

CAT = image_file(56, 56, seed=1)
DOG = image_file(84, 56, seed=2)
EXACT = 1e-4


async def check_against_transformers(vision: Any, request: SampleRequest, model: Any = None) -> None:
    result = await vision.engine.sample(request)
    result.check_answers(request)
    model = model or load_vision_model(vision.folder)
    for sequence in result.sequences:
        ids = token_ids(np.concatenate([request.prompt_ids, sequence.completion_ids]))
        expected = model_logprobs(model, vision.processor, ids, request.images)[len(request.prompt_ids) - 1 :]
        np.testing.assert_allclose(sequence.rollout_logprobs, expected, atol=EXACT)


async def test_logprobs_after_several_images_are_those_of_transformers(vision_vllm: Any) -> None:
    assert vision_vllm.engine.takes_images
    request = ask_with_images(vision_vllm.processor, 5, CAT, 6, 7, DOG, 8, CAT, 9, n=2)
    assert [span.length for span in request.images] == [4, 6, 4]
    await check_against_transformers(vision_vllm, request)


async def test_settings_change_what_the_model_sees(vision_vllm: Any) -> None:
    smaller = image_settings({"max_pixels": 28 * 28 * 2})
    request = ask_with_images(vision_vllm.processor, 5, DOG, 6, settings=smaller)
    assert request.images[0].length == 1
    await check_against_transformers(vision_vllm, request)
    await check_against_transformers(vision_vllm, ask_with_images(vision_vllm.processor, 5, DOG, 6))


async def test_the_order_of_images_of_one_size_matters(vision_vllm: Any) -> None:
    other = image_file(56, 56, seed=3)
    requests = [
        ask_with_images(vision_vllm.processor, 5, pair[0], 6, pair[1], 7) for pair in ((CAT, other), (other, CAT))
    ]
    assert requests[0].prompt_ids.tolist() == requests[1].prompt_ids.tolist()
    first, second = [(await vision_vllm.engine.sample(request)).sequences[0] for request in requests]
    assert abs(first.rollout_logprobs[0] - second.rollout_logprobs[0]) > 0.01
    for request in requests:
        await check_against_transformers(vision_vllm, request)


async def test_scores_of_a_prompt_with_images_are_those_of_transformers(vision_vllm: Any) -> None:
    request = ask_with_images(vision_vllm.processor, 5, 6, CAT, 7, DOG, 8, 9)
    scored = await vision_vllm.engine.score(request.prompt_ids, images=request.images)
    model = load_vision_model(vision_vllm.folder)
    expected = model_logprobs(model, vision_vllm.processor, request.prompt_ids, request.images)
    np.testing.assert_allclose(scored.logprobs, expected, atol=EXACT)


async def test_chunks_of_a_stream_with_images_join_to_what_sample_returns(vision_vllm: Any) -> None:
    request = ask_with_images(vision_vllm.processor, 5, CAT, 6)
    whole = (await vision_vllm.engine.sample(request)).sequences[0]
    joined = SampleChunk.join([chunk async for chunk in vision_vllm.engine.stream(request)], temperature=1.0)
    assert joined.completion_ids.tolist() == whole.completion_ids.tolist()


async def test_the_names_of_the_images_come_back(vision_vllm: Any) -> None:
    result = await vision_vllm.engine.sample(ask_with_images(vision_vllm.processor, CAT, 5, DOG))
    assert result.image_sha256s == (CAT.sha256, DOG.sha256)


async def test_requests_with_and_without_images_run_together(vision_vllm: Any) -> None:
    files = [image_file(28 * (1 + k % 3), 56, seed=k) for k in range(5)]
    requests = [
        ask_with_images(
            vision_vllm.processor,
            *[part for file in files[: k % 4] for part in (file, 5)],
            6 + k,
            request_id=str(k),
            seed=k,
        )
        for k in range(16)
    ]
    model = load_vision_model(vision_vllm.folder)
    await asyncio.gather(*(check_against_transformers(vision_vllm, request, model) for request in requests))


def with_span(request: SampleRequest, **changes: Any) -> SampleRequest:
    return replace(request, images=(replace(request.images[0], **changes), *request.images[1:]))


def too_many(processor: Any) -> SampleRequest:
    return ask_with_images(processor, *[CAT] * (MAX_IMAGES + 1))


def stray(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, CAT, 6)
    return replace(request, prompt_ids=token_ids([*request.prompt_ids, processor.placeholder_id, 7]))


def too_long(processor: Any) -> SampleRequest:
    """Fewer ids than the context before the image is expanded, more afterwards."""
    return ask_with_images(processor, *[5] * (CONTEXT_LENGTH - 3), CAT)


def shorter_than_its_image(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, CAT, 6, DOG)
    ids = np.delete(request.prompt_ids, request.images[0].offset)
    shift = [replace(span, offset=span.offset - 1) for span in request.images[1:]]
    return replace(request, prompt_ids=ids, images=(replace(request.images[0], length=3), *shift))


def of_swapped_sizes(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, CAT, 6, DOG)
    first, second = request.images
    return replace(request, images=(replace(first, image=second.image), replace(second, image=first.image)))


def of_other_settings(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, DOG, 6)
    return with_span(request, settings=image_settings({"max_pixels": 28 * 28 * 2}))


FAILURES = [
    (too_many, SamplingError, f"images must be at most {MAX_IMAGES} for one prompt of this engine, got 9"),
    (
        stray,
        SamplingError,
        "prompt_ids must hold the image placeholder .* inside of images only, got one at position 6",
    ),
    (too_long, ContextOverflowError, "512 tokens, but your request has 513"),
    (shorter_than_its_image, EchoError, r"images\[0\] \(sha256 .* has 3 ids in the prompt that was sent and 4 in"),
    (of_swapped_sizes, EchoError, r"images\[0\] \(sha256 .* has 4 ids in the prompt that was sent and 6 in"),
    (of_other_settings, EchoError, r"images\[0\] .*max_pixels.* has 6 ids in the prompt that was sent and 1 in"),
    (
        lambda processor: with_span(ask_with_images(processor, CAT, 5), image=EncodedImage(b"no picture")),
        ImageError,
        r"images\[0\] must be an image file",
    ),
    (
        lambda processor: with_span(ask_with_images(processor, CAT, 5), image=EncodedImage(CAT.data[:-400])),
        ImageError,
        r"images\[0\] must be a whole PNG file",
    ),
    (
        lambda processor: with_span(ask_with_images(processor, CAT, 5), image=image_file(2, 800)),
        ImageError,
        "vLLM refuses the 1 images of 'a': .*absolute aspect ratio must be smaller than 200",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), FAILURES)
async def test_images_that_cannot_be_are_refused_by_name_and_harm_nobody(
    vision_vllm: Any, make: Any, error: type[Exception], message: str
) -> None:
    other = ask_with_images(vision_vllm.processor, 5, CAT, 6, DOG, request_id=uuid4().hex, max_tokens=40)
    running = asyncio.create_task(vision_vllm.engine.sample(other))
    request = make(vision_vllm.processor)
    with pytest.raises(error, match=message):
        await vision_vllm.engine.sample(request)
    with pytest.raises(error, match=message):
        await anext(vision_vllm.engine.stream(request))
    assert len((await running).sequences[0].completion_ids) == 40
    await check_against_transformers(vision_vllm, ask_with_images(vision_vllm.processor, 5, CAT, 6, DOG))


async def test_a_text_model_takes_no_images(shared_vllm: Any) -> None:
    assert not shared_vllm.engine.takes_images
    span = ImageSpan(offset=1, length=2, image=CAT, placeholder_id=7)
    request = SampleRequest(request_id="a", prompt_ids=token_ids([1, 7, 7]), images=(span,))
    with pytest.raises(SamplingError, match="takes no images, got 1: its model is one of text"):
        await shared_vllm.engine.sample(request)
    with pytest.raises(SamplingError, match="takes no images, got 1"):
        await shared_vllm.engine.score(request.prompt_ids, images=request.images)


async def test_an_image_whose_request_was_cancelled_on_its_way_is_sent_again(vision_vllm: Any) -> None:
    """vLLM's front believes then that its back has the image."""
    for seed in range(20, 28):
        request = ask_with_images(vision_vllm.processor, 5, image_file(112, 112, seed=seed), 6, n=2)
        first = asyncio.create_task(vision_vllm.engine.sample(request))
        made = asyncio.create_task(vision_vllm.engine._prompts.engine_input(request))
        await made  # behind the first in vLLM's thread
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await check_against_transformers(vision_vllm, request)


async def test_an_abort_while_images_are_prepared_ends_the_request(vision_vllm: Any) -> None:
    request = ask_with_images(vision_vllm.processor, 5, image_file(112, 112, seed=40), max_tokens=300)
    running = asyncio.create_task(vision_vllm.engine.sample(request))
    await asyncio.sleep(0)
    await vision_vllm.engine.abort("a")
    sequence = (await running).sequences[0]
    assert sequence.finish_reason is FinishReason.ABORT
    assert len(sequence.completion_ids) == 0
    await check_against_transformers(
        vision_vllm, request=replace(request, params=replace(request.params, max_tokens=4))
    )


async def test_i6_what_older_weights_saw_in_an_image_is_forgotten(vision_vllm: Any, tmp_path: Path) -> None:
    engine = vision_vllm.engine
    request = ask_with_images(vision_vllm.processor, 5, CAT, 6, max_tokens=4)
    await check_against_transformers(vision_vllm, request)
    for folder in (save_vision_model(tmp_path, seed=1), vision_vllm.folder):
        weights = load_file(folder / "model.safetensors")
        running = asyncio.create_task(engine.sample(replace(request, request_id="b")))
        await engine.load_weights(weights.items(), policy_version=engine.policy_version + 1)
        await running
        await check_against_transformers(vision_vllm, request, load_vision_model(folder))
