"""What callers may rely on in every engine that takes images; transformers' plain forward pass is the reference."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.vision import Family, save_vision_model
from support.vision_engines import (
    CONTEXT_LENGTH,
    VisionEngine,
    ask_with_images,
    image_file,
    load_vision_model,
    model_logprobs,
    own_processor,
)
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import ContextOverflowError, EchoError, ImageError
from unbroken.types import (
    EncodedImage,
    FinishReason,
    SampleChunk,
    SampleRequest,
    SamplingParams,
    encode_image_settings,
    token_ids,
)
from unbroken.weights.sources import TensorSource

pytest.importorskip("torchvision", reason="needs torchvision")

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:Passing .min_pixels. and .max_pixels. to a processor call:FutureWarning"),
]

CAT = image_file(56, 56, seed=1)
DOG = image_file(84, 56, seed=2)
EXACT = 1e-4
SMALLER = encode_image_settings({"max_pixels": 28 * 28 * 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    engine: Any
    processor: Any
    model: Any
    """The same weights."""
    other: Any
    """Another model of the kind."""

    async def check(self, request: SampleRequest, model: Any = None) -> None:
        """Compare an answer with a forward pass."""
        result = await self.engine.sample(request)
        result.check_answers(request)
        for sequence in result.sequences:
            ids = token_ids(np.concatenate([request.prompt_ids, sequence.completion_ids]))
            expected = model_logprobs(model or self.model, self.processor, ids, request.images)
            np.testing.assert_allclose(
                sequence.rollout_logprobs, expected[len(request.prompt_ids) - 1 :], atol=EXACT, rtol=0
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the subjects of a family share."""

    folder: Path
    processor: Any
    model: Any
    other: Any


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Saved]:
    @functools.cache
    def make(family: Family) -> Saved:
        folder, other = (
            save_vision_model(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed=seed) for seed in (0, 1)
        )
        return Saved(
            folder=folder,
            processor=own_processor(folder),
            model=load_vision_model(folder),
            other=load_vision_model(other),
        )

    return make


def embedded(of_family: Saved) -> Subject:
    engine = TransformersEngine(
        load_vision_model(of_family.folder),
        config=TransformersEngineConfig(max_batch=8, context_length=CONTEXT_LENGTH, max_prefill_tokens=48),
        image_processor=of_family.processor,
    )
    return Subject(engine=engine, processor=of_family.processor, model=of_family.model, other=of_family.other)


@pytest.fixture
def qwen_subject(saved: Callable[[Family], Saved]) -> Subject:
    return embedded(saved("qwen2_5_vl"))


@pytest.fixture
def llava_subject(saved: Callable[[Family], Saved]) -> Subject:
    return embedded(saved("llava"))


@pytest.fixture
def vllm_subject(vision_vllm: VisionEngine, tmp_path: Path) -> Subject:
    return Subject(
        engine=vision_vllm.engine,
        processor=vision_vllm.processor,
        model=load_vision_model(vision_vllm.folder),
        other=load_vision_model(save_vision_model(tmp_path, seed=1)),
    )


@pytest.fixture(params=["qwen_subject", "llava_subject", "vllm_subject"])
def any_subject(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def subject(any_subject: Subject, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    yield any_subject
    if "vllm" not in request.node.callspec.id:
        await any_subject.engine.close()


async def test_logprobs_after_several_images_are_those_of_transformers(subject: Subject) -> None:
    assert subject.engine.takes_images
    await subject.check(ask_with_images(subject.processor, 5, CAT, 6, 7, DOG, 8, CAT, 9, n=3, max_tokens=20))


async def test_a_prompt_may_end_with_an_image(subject: Subject) -> None:
    await subject.check(ask_with_images(subject.processor, 5, CAT))


async def test_a_placeholder_id_that_the_model_sampled_is_text_and_gets_no_image(subject: Subject) -> None:
    pad = subject.processor.placeholder_id
    for parts in ((5, pad, 7), (5, CAT, 6, pad, 7), (5, pad, 6, CAT, pad, pad, 8, DOG, 9, pad)):
        request = with_sampled_placeholders(subject.processor, *parts)
        await subject.check(request)
        scored = await subject.engine.score(request.prompt_ids, images=request.images)
        expected = model_logprobs(subject.model, subject.processor, request.prompt_ids, request.images)
        np.testing.assert_allclose(scored.logprobs, expected, atol=EXACT, rtol=0)


def with_sampled_placeholders(processor: Any, *parts: int | EncodedImage) -> SampleRequest:
    """A request in which the placeholders among the parts belong to no image."""
    pad, other = processor.placeholder_id, 4
    request = ask_with_images(processor, *[other if part == pad else part for part in parts])
    assert other not in parts
    return replace(request, prompt_ids=token_ids(np.where(request.prompt_ids == other, pad, request.prompt_ids)))


async def test_settings_change_what_the_model_sees(subject: Subject) -> None:
    if "max_pixels" not in subject.processor.setting_names:
        pytest.skip("its images are of one size")
    smaller = ask_with_images(subject.processor, 5, DOG, 6, settings=SMALLER)
    assert [span.length for span in smaller.images] == [1]
    await subject.check(smaller)
    await subject.check(ask_with_images(subject.processor, 5, DOG, 6))


async def test_i6_a_cached_prefix_of_the_same_ids_with_other_images_is_not_reused(subject: Subject) -> None:
    other = image_file(56, 56, seed=3)
    requests = [
        ask_with_images(subject.processor, *range(5, 60), *parts, *range(70, 120))
        for parts in ((CAT, 6, other), (other, 6, CAT), (CAT, 6, CAT), (CAT, 6, other))
    ]
    assert len({tuple(request.prompt_ids) for request in requests}) == 1
    first = [(await subject.engine.sample(request)).sequences[0].rollout_logprobs[0] for request in requests]
    assert first[0] == pytest.approx(first[3], abs=EXACT)
    assert min(abs(first[0] - first[1]), abs(first[0] - first[2]), abs(first[1] - first[2])) > 1e-3
    for request in requests:
        await subject.check(request)


async def test_i1_each_turn_of_a_conversation_may_bring_another_image(subject: Subject) -> None:
    parts: list[int | EncodedImage] = [5, CAT, 6]
    for turn in range(4):
        request = ask_with_images(subject.processor, *parts, request_id=f"c/{turn}", max_tokens=12, seed=2)
        await subject.check(request)
        sampled = (await subject.engine.sample(request)).sequences[0].completion_ids.tolist()
        parts += [*sampled, 7, image_file(56, 84, seed=turn), 8]


async def test_scores_of_a_prompt_with_images_are_those_of_transformers(subject: Subject) -> None:
    request = ask_with_images(subject.processor, 5, 6, CAT, 7, DOG, 8, 9)
    scored = await subject.engine.score(request.prompt_ids, images=request.images, temperature=0.7)
    expected = model_logprobs(subject.model, subject.processor, request.prompt_ids, request.images, temperature=0.7)
    np.testing.assert_allclose(scored.logprobs, expected, atol=EXACT, rtol=0)


async def test_chunks_of_a_stream_with_images_join_to_what_sample_returns(subject: Subject) -> None:
    request = ask_with_images(subject.processor, 5, CAT, 6)
    whole = (await subject.engine.sample(request)).sequences[0]
    joined = SampleChunk.join([chunk async for chunk in subject.engine.stream(request)], params=SamplingParams())
    assert joined.completion_ids.tolist() == whole.completion_ids.tolist()


async def test_i3_the_names_of_the_images_come_back(subject: Subject) -> None:
    result = await subject.engine.sample(ask_with_images(subject.processor, CAT, 5, DOG))
    assert result.image_sha256s == (CAT.sha256, DOG.sha256)


async def test_requests_with_and_without_images_run_together(subject: Subject) -> None:
    files = [image_file(28 * (1 + k % 3), 56, seed=k) for k in range(5)]
    requests = [
        ask_with_images(
            subject.processor,
            5,
            *(part for file in files[: k % 4] for part in (file, 5)),
            6 + k,
            request_id=str(k),
            seed=k,
            max_tokens=1 + k,
        )
        for k in range(24)
    ]
    await asyncio.gather(*(subject.check(request) for request in requests))


async def test_i6_what_older_weights_saw_in_an_image_is_forgotten(subject: Subject) -> None:
    request = ask_with_images(subject.processor, 5, CAT, 6, max_tokens=4)
    await subject.check(request)
    for model in (subject.other, subject.model):
        running = asyncio.create_task(
            subject.engine.sample(replace(request, request_id="b", params=replace(request.params, max_tokens=60)))
        )
        await asyncio.sleep(0.05)
        new = subject.engine.policy_version + 1
        await subject.engine.update_weights(TensorSource(model.named_parameters()), policy_version=new)
        sequence = (await running).sequences[0]
        ids = token_ids(np.concatenate([request.prompt_ids, sequence.completion_ids]))
        expected = model_logprobs(model, subject.processor, ids, request.images)[len(request.prompt_ids) - 1 :]
        is_new = sequence.policy_versions == new
        np.testing.assert_allclose(sequence.rollout_logprobs[is_new], expected[is_new], atol=EXACT, rtol=0)
        await subject.check(request, model)


async def test_an_abort_while_images_are_prepared_ends_the_request(subject: Subject) -> None:
    request = ask_with_images(subject.processor, 5, image_file(112, 112, seed=40), max_tokens=300)
    running = asyncio.create_task(subject.engine.sample(request))
    await asyncio.sleep(0)
    await subject.engine.abort("a")
    sequence = (await running).sequences[0]
    assert sequence.finish_reason is FinishReason.ABORT
    assert len(sequence.completion_ids) < 300
    await subject.check(replace(request, params=replace(request.params, max_tokens=4)))


def with_file(request: SampleRequest, data: bytes) -> SampleRequest:
    return replace(request, images=(replace(request.images[0], image=EncodedImage(data)), *request.images[1:]))


def of_no_picture(processor: Any) -> SampleRequest:
    return with_file(ask_with_images(processor, 5, CAT), b"no picture")


def of_half_a_file(processor: Any) -> SampleRequest:
    return with_file(ask_with_images(processor, 5, CAT), CAT.data[:-400])


def too_long_once_expanded(processor: Any) -> SampleRequest:
    return ask_with_images(processor, *[5] * (CONTEXT_LENGTH - 3), CAT)


def shorter_than_its_image(processor: Any) -> SampleRequest:
    request = ask_with_images(processor, 5, CAT, 6, DOG)
    first, second = request.images
    images = (replace(first, length=first.length - 1), replace(second, offset=second.offset - 1))
    return replace(request, prompt_ids=np.delete(request.prompt_ids, first.offset), images=images)


def of_a_border_between_images_that_is_moved(processor: Any) -> SampleRequest:
    """The ids are the same."""
    request = ask_with_images(processor, 5, CAT, DOG, 6)
    first, second = request.images
    moved = replace(second, offset=second.offset - 1, length=second.length + 1)
    return replace(request, images=(replace(first, length=first.length - 1), moved))


FAILURES: list[tuple[Callable[[Any], SampleRequest], type[Exception], str]] = [
    (of_no_picture, ImageError, r"images\[0\] must be an image file"),
    (of_half_a_file, ImageError, r"images\[0\] must be a whole PNG file"),
    (too_long_once_expanded, ContextOverflowError, "512 tokens, but your request has"),
    (
        of_a_border_between_images_that_is_moved,
        EchoError,
        r"images\[0\] \(sha256 .* ids in the prompt that was sent and",
    ),
    (shorter_than_its_image, EchoError, r"images\[0\] \(sha256 .* ids in the prompt that was sent and .* in"),
]


@pytest.mark.parametrize(("make", "error", "message"), FAILURES)
async def test_images_that_cannot_be_are_refused_by_name_and_harm_nobody(
    subject: Subject, make: Callable[[Any], SampleRequest], error: type[Exception], message: str
) -> None:
    other = ask_with_images(subject.processor, 5, CAT, 6, DOG, request_id="b", max_tokens=40)
    running = asyncio.create_task(subject.engine.sample(other))
    request = make(subject.processor)
    with pytest.raises(error, match=message):
        await subject.engine.sample(request)
    with pytest.raises(error, match=message):
        await anext(subject.engine.stream(request))
    assert len((await running).sequences[0].completion_ids) == 40
    await subject.check(ask_with_images(subject.processor, 5, CAT, 6, DOG))
