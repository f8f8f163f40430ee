"""Images in the embedded engine beyond the contract: which models it takes, and requests that come at a bad time."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.architectures import tiny_model
from support.vision import save_vision_model
from support.vision_engines import ask_with_images, image_file, load_vision_model, own_processor
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.engines.transformers.images import PromptImages
from unbroken.errors import EngineError, ImageError, InvalidInputError, SamplingError

pytest.importorskip("torchvision", reason="needs torchvision")

CAT = image_file(56, 56, seed=1)
DOG = image_file(84, 56, seed=2)


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Any]:
    save_vision_model(tmp_path)
    processor = own_processor(tmp_path)
    engine = TransformersEngine(
        load_vision_model(tmp_path),
        config=TransformersEngineConfig(max_batch=4, context_length=256),
        image_processor=processor,
    )
    yield engine
    await engine.close()


@pytest.fixture
def processor(tmp_path: Path, engine: Any) -> Any:
    return own_processor(tmp_path)


def test_features_and_positions_of_a_prompt_with_images_by_small_integers() -> None:
    """11 [90 90 90 90] 12, an image of 2 x 2 features: it takes 2 positions in depth of the rope, not 4."""
    images = PromptImages(
        keys=np.array([11, -1, -1, -1, -1, 12], dtype=np.int32),
        images=(),
        places=(np.array([1, 2, 3, 4]),),
        rope=np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]),
    )
    assert images.rope_at(np.array([4, 5, 6, 9])).tolist() == [[1, 3, 4, 7], [2, 3, 4, 7], [2, 3, 4, 7]]
    found = [(number, columns.tolist(), of.tolist()) for number, columns, of in images.features_at(np.array([0, 3, 4]))]
    assert found == [(0, [1, 2], [2, 3])]
    assert list(images.features_at(np.array([0, 5, 6]))) == []


def test_a_model_without_a_vision_part_is_refused(tmp_path: Path) -> None:
    processor = own_processor(save_vision_model(tmp_path))
    with pytest.raises(InvalidInputError, match="takes no images: it has no get_image_features"):
        TransformersEngine(tiny_model(), image_processor=processor)


def test_a_model_whose_images_see_more_than_their_pixels_is_refused(tmp_path: Path) -> None:
    model = load_vision_model(save_vision_model(tmp_path, "llava"))
    alone = model.base_model.get_image_features

    def by_company(pixel_values: Any, **options: Any) -> Any:
        outputs = alone(pixel_values, **options)
        outputs.pooler_output = tuple(features * len(pixel_values) for features in outputs.pooler_output)
        return outputs

    model.base_model.get_image_features = by_company
    with pytest.raises(InvalidInputError, match="gives other logits with a cache of slots than without"):
        TransformersEngine(model, image_processor=own_processor(tmp_path))


async def test_images_that_nothing_sets_apart_are_refused_where_positions_need_it(engine: Any, processor: Any) -> None:
    request = ask_with_images(processor, 5, CAT, DOG, 6)
    with pytest.raises(ImageError, match=r"images must have text ids between them .* \[\(1, 5\), \(5, 11\)\]"):
        await engine.sample(request)
    with pytest.raises(ImageError, match="must have text ids between them"):
        await engine.score(request.prompt_ids, images=request.images)
    await engine.sample(ask_with_images(processor, 5, CAT, 6, DOG))


async def test_a_request_id_in_use_by_a_request_whose_images_are_prepared_is_refused(
    engine: Any, processor: Any
) -> None:
    request = ask_with_images(processor, 5, CAT, 6, max_tokens=3)
    first = asyncio.create_task(engine.sample(request))
    await asyncio.sleep(0)
    with pytest.raises(SamplingError, match="'a' is in use"):
        await engine.sample(request)
    assert len((await first).sequences[0].completion_ids) == 3
    await engine.sample(request)


async def test_an_engine_that_closes_while_images_are_prepared_refuses_their_request(
    engine: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, closed = engine._forward.images, threading.Event()
    prepare = images.prepare
    # The thread has the images until the engine is closed: else the whole request may be done before.
    monkeypatch.setattr(images, "prepare", lambda *args: closed.wait() and prepare(*args))
    running = asyncio.create_task(engine.sample(ask_with_images(processor, 5, CAT, 6)))
    await asyncio.sleep(0)
    await engine.close()
    closed.set()
    with pytest.raises(EngineError, match="closed"):
        await running


async def test_a_closed_engine_keeps_no_model_and_says_that_it_is_closed(tmp_path: Path) -> None:
    model = load_vision_model(save_vision_model(tmp_path))
    processor, backbone = own_processor(tmp_path), weakref.ref(model.base_model)
    engine = TransformersEngine(model, image_processor=processor)
    del model
    await engine.close()
    gc.collect()
    assert backbone() is None
    with pytest.raises(EngineError, match="the engine is closed"):
        await engine.sample(ask_with_images(processor, 5, CAT, 6))


async def test_an_image_is_seen_once_for_all_completions_of_its_prompt(tmp_path: Path) -> None:
    model = load_vision_model(save_vision_model(tmp_path))
    alone, calls = model.base_model.get_image_features, []

    @functools.wraps(alone)
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return alone(*args, **options)

    model.base_model.get_image_features = counted
    processor = own_processor(tmp_path)
    engine = TransformersEngine(model, image_processor=processor)
    calls.clear()
    await engine.sample(ask_with_images(processor, *range(20), CAT, 6, DOG, 7, n=4))
    assert len(calls) == 2
    await engine.sample(ask_with_images(processor, *range(20), CAT, 6, DOG, 7, 8, CAT, 9))
    assert len(calls) == 3  # the others' keys and values are cached
    await engine.close()
