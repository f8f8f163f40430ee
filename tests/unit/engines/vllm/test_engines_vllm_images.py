"""Images in vLLM beyond the contract: its limits, its caches in two processes, updates while it computes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from safetensors.torch import load_file

from support.vision_engines import MAX_IMAGES, ask_with_images, image_file, load_vision_model, model_logprobs
from unbroken.errors import EchoError, ImageError, SamplingError
from unbroken.types import ImageSpan, SampleRequest, encode_image_settings, token_ids
from unbroken.weights.sources import TensorSource

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
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


def with_span(request: SampleRequest, **changes: Any) -> SampleRequest:
    return replace(request, images=(replace(request.images[0], **changes), *request.images[1:]))


def too_many(processor: Any) -> SampleRequest:
    return ask_with_images(processor, *[CAT] * (MAX_IMAGES + 1))


def of_swapped_sizes(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, CAT, 6, DOG)
    first, second = request.images
    return replace(request, images=(replace(first, image=second.image), replace(second, image=first.image)))


def of_other_settings(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, DOG, 6)
    return with_span(request, settings=encode_image_settings({"max_pixels": 28 * 28 * 2}))


FAILURES = [
    (too_many, SamplingError, f"images must be at most {MAX_IMAGES} for one prompt of this engine, got 9"),
    (of_swapped_sizes, EchoError, r"images\[0\] \(sha256 .* has 4 ids in the prompt that was sent and 6 in"),
    (of_other_settings, EchoError, r"images\[0\] .*max_pixels.* has 6 ids in the prompt that was sent and 1 in"),
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
    with pytest.raises(SamplingError, match="takes no images, got 1: its model reads text only"):
        await shared_vllm.engine.sample(request)
    with pytest.raises(SamplingError, match="takes no images, got 1"):
        await shared_vllm.engine.score(request.prompt_ids, images=request.images)


async def test_an_image_whose_request_was_cancelled_on_its_way_is_sent_again(vision_vllm: Any) -> None:
    """vLLM's front believes then that its back has the image."""
    for seed in range(20, 28):
        request = ask_with_images(vision_vllm.processor, 5, image_file(112, 112, seed=seed), 6, n=2)
        first = asyncio.create_task(vision_vllm.engine.sample(request))
        made = asyncio.create_task(vision_vllm.engine._prompts.make_input(request))
        await made  # behind the first in vLLM's thread
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await check_against_transformers(vision_vllm, request)


async def test_an_image_that_leaves_the_cache_while_its_prompt_is_rendered_is_processed(
    vision_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks its cache first, and takes the image later: a lost image of another request may leave between."""
    request = ask_with_images(vision_vllm.processor, 5, image_file(84, 84, seed=40), 6)
    await check_against_transformers(vision_vllm, request)
    cache = vision_vllm.engine._llm.renderer.mm_processor_cache
    ask, dropped = cache.is_cached, []

    def ask_then_drop(hashes: list[str]) -> list[bool]:
        answer: list[bool] = ask(hashes)
        if not dropped:
            dropped.extend(name for name, known in zip(hashes, answer, strict=True) if known)
            for name in dropped:
                cache.invalidate(name)
        return answer

    monkeypatch.setattr(cache, "is_cached", ask_then_drop)
    await check_against_transformers(vision_vllm, request)
    assert len(dropped) == 1


async def test_an_update_that_keeps_kv_harms_no_running_request_with_images(vision_vllm: Any) -> None:
    engine = vision_vllm.engine
    weights = load_file(vision_vllm.folder / "model.safetensors")
    request = ask_with_images(vision_vllm.processor, 5, CAT, 6, DOG, 7, max_tokens=60)
    running = [asyncio.create_task(engine.sample(replace(request, request_id=str(k)))) for k in range(4)]
    await engine.update_weights(TensorSource(weights.items()), policy_version=engine.policy_version + 1, reuse_kv=True)
    assert [len((await call).sequences[0].completion_ids) for call in running] == [60] * 4
    await check_against_transformers(vision_vllm, request)
