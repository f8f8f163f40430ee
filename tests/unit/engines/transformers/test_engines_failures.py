"""What ends one request, what ends the engine, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.architectures import tiny_model
from unbroken.engines.registry import EngineOptions
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.engines.transformers.engine import open_engine
from unbroken.errors import EngineError, InvalidInputError
from unbroken.images.decoder import ImageLimits
from unbroken.types import FinishReason, SampleRequest, SamplingParams, token_ids
from unbroken.weights.sources import TensorSource

PROMPT_IDS = token_ids(range(3, 40))


def ask(request_id: str, prompt_ids: Any = PROMPT_IDS, n: int = 1, **params: Any) -> SampleRequest:
    return SampleRequest(request_id=request_id, prompt_ids=prompt_ids, n=n, params=SamplingParams(seed=1, **params))


def raising(error: BaseException) -> Callable[[list[int]], str]:
    def decode(ids: list[int]) -> str:
        if len(ids) == 3:
            raise error
        return ""

    return decode


def weights(value: float | None = None) -> list[tuple[str, Any]]:
    """The tiny model's, or all of one value."""
    named = tiny_model().named_parameters()
    return [(name, old if value is None else torch.full_like(old, value)) for name, old in named]


async def sampled(engine: TransformersEngine, request: SampleRequest) -> list[list[int]]:
    return [sequence.completion_ids.tolist() for sequence in (await engine.sample(request)).sequences]


@pytest.mark.parametrize("max_batch", [2, 16])
async def test_a_decode_that_raises_ends_its_request_and_no_other(max_batch: int) -> None:
    config = TransformersEngineConfig(max_batch=max_batch)
    engine = TransformersEngine(tiny_model(), config=config, decode=raising(KeyError("broken")))
    expected = await sampled(engine, ask("alone", max_tokens=20, n=2))
    assert expected[1][2] not in expected[0][:3] + expected[1][:2]
    await engine.pause()
    calls = [
        # The second row samples its stop id in the step in which decoding the first one fails.
        sampled(engine, ask("bad", n=3, stop_strings=("x",), stop_token_ids=(expected[1][2],))),
        sampled(engine, ask("good", max_tokens=20, n=2)),
    ]
    bad, good, _ = await asyncio.gather(*calls, engine.resume(), return_exceptions=True)
    assert isinstance(bad, EngineError)
    assert "'bad'" in str(bad)
    assert isinstance(bad.__cause__, KeyError)
    assert good == expected
    assert await sampled(engine, ask("bad", max_tokens=20, n=2)) == expected
    await engine.close()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_ends_the_thread_reaches_every_caller_and_nobody_hangs(error: BaseException) -> None:
    engine = TransformersEngine(tiny_model(), decode=raising(error))
    await engine.pause()
    calls = [engine.sample(ask("a")), engine.sample(ask("b", stop_strings=("x",))), engine.resume()]
    async with asyncio.timeout(60):
        first, second, _ = await asyncio.gather(*calls, return_exceptions=True)
        for failed in (first, second):
            assert isinstance(failed, EngineError)
            assert failed.__cause__ is error
        for call in (engine.sample(ask("c")), engine.abort("a"), engine.score(PROMPT_IDS)):
            with pytest.raises(EngineError, match="failed earlier"):
                await call
        await engine.close()


async def test_a_failure_of_the_model_reaches_every_caller_and_ends_the_engine() -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("broken model")

    model = tiny_model()
    engine = TransformersEngine(model)
    await engine.pause()
    model.register_forward_pre_hook(broken)
    async with asyncio.timeout(60):
        calls = [engine.sample(ask("a")), engine.sample(ask("b")), engine.resume()]
        first, second, _ = await asyncio.gather(*calls, return_exceptions=True)
        for failed in (first, second):
            assert isinstance(failed, EngineError)
            assert isinstance(failed.__cause__, ZeroDivisionError)
        with pytest.raises(EngineError, match="failed earlier"):
            await engine.sample(ask("c"))
        await engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_weights_that_are_not_finite_fail_their_requests_and_good_ones_are_the_cure(
    value: float, temperature: float
) -> None:
    engine = TransformersEngine(tiny_model())
    requests = [ask(str(k), PROMPT_IDS[: 5 + 8 * k], temperature=temperature, max_tokens=12, n=2) for k in range(4)]
    expected = [await sampled(engine, request) for request in requests]
    await engine.update_weights(TensorSource(weights(value)), policy_version=1)
    calls = [engine.sample(request) for request in requests]
    for failed in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failed, EngineError)
        assert "policy_version 1" in str(failed)
    with pytest.raises(EngineError, match="not finite"):
        await engine.score(PROMPT_IDS)
    await engine.update_weights(TensorSource(weights()), policy_version=2, reuse_kv=True)
    assert await asyncio.gather(*(sampled(engine, request) for request in requests)) == expected
    await engine.close()


async def test_broken_keys_of_a_request_that_was_aborted_unsampled_harm_nobody() -> None:
    engine = TransformersEngine(tiny_model(), config=TransformersEngineConfig(max_batch=2, max_prefill_tokens=4))
    short, long = ask("short", PROMPT_IDS[:5], max_tokens=12), ask("long", max_tokens=12)
    expected = [await sampled(engine, short), await sampled(engine, long)]
    await engine.update_weights(TensorSource(weights(float("nan"))), policy_version=1)
    before = engine.stats.num_prefilled
    running = asyncio.create_task(engine.sample(ask("aborted", np.tile(PROMPT_IDS, 6))))
    async with asyncio.timeout(60):
        while engine.stats.num_prefilled < before + 40:  # noqa: ASYNC110  # engines announce no steps
            await asyncio.sleep(0)
    await engine.abort("aborted")
    assert (await running).sequences[0].finish_reason is FinishReason.ABORT
    await engine.update_weights(TensorSource(weights()), policy_version=2)
    assert await asyncio.gather(sampled(engine, short), sampled(engine, long)) == expected
    await engine.close()


async def test_a_row_that_breaks_takes_no_other_with_it() -> None:
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    engine = TransformersEngine(model)
    expected = await sampled(engine, ask("alone", max_tokens=20, n=2, stop_token_ids=(50,)))
    await engine.pause()
    calls = [
        sampled(engine, ask("good", max_tokens=20, n=2, stop_token_ids=(50,))),
        sampled(engine, ask("bad", np.append(PROMPT_IDS, 50))),
    ]
    good, bad, _ = await asyncio.gather(*calls, engine.resume(), return_exceptions=True)
    assert isinstance(bad, EngineError)
    assert good == expected
    await engine.close()


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
async def test_a_device_that_torch_cannot_use_is_refused_before_the_model_is_loaded(device: str) -> None:
    options = EngineOptions(
        model="nobody/nothing", words=("--device", device), decode=str, image_limits=ImageLimits(), max_top_logprobs=0
    )
    with pytest.raises(InvalidInputError, match=f"--device must be one that torch can use here, got '{device}': "):
        await open_engine(options)
