"""Experts that the embedded engine records are those that computed each id, however it was batched and cached."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from support.architectures import tiny_model
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import InvalidInputError, SamplingError
from unbroken.routing import Routers
from unbroken.types import SampleChunk, SampledSequence, SampleRequest, SamplingParams, token_ids

PARAMS = SamplingParams(max_tokens=9, seed=1, return_routed_experts=True)
RECORDING = TransformersEngineConfig(records_routing=True, max_prefill_tokens=16)


def make_engine(**changes: Any) -> TransformersEngine:
    return TransformersEngine(tiny_model("qwen3_moe", **changes), config=RECORDING)


def plain_experts(ids: np.ndarray) -> np.ndarray:
    """[R, L, K] of one forward pass over all ids but the last, each id's in order of the expert's number."""
    model = tiny_model("qwen3_moe")
    routers = Routers.find(model)
    with routers.recording() as chosen, torch.no_grad():
        model(input_ids=torch.from_numpy(ids[:-1].astype(np.int64))[None], use_cache=False)
    return np.sort(routers.stack(chosen).numpy(), axis=-1)


def assert_recorded(prompt_ids: np.ndarray, sequence: SampledSequence) -> None:
    assert sequence.routed_experts is not None
    assert sequence.routed_experts.dtype == np.uint8
    expected = plain_experts(np.concatenate([prompt_ids, sequence.completion_ids]))
    np.testing.assert_array_equal(np.sort(sequence.routed_experts, axis=-1), expected)


async def test_experts_are_those_of_a_plain_pass_for_many_rows_and_reused_prefixes():
    """Prompts of several lengths and passes, copies of a shared prefix, a second turn on a cached first one."""
    engine = make_engine()
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 60, 20)
    prompts = [token_ids(np.concatenate([shared, rng.integers(3, 60, k)])) for k in (1, 7, 30)]
    requests = [SampleRequest(request_id=str(k), prompt_ids=ids, params=PARAMS, n=2) for k, ids in enumerate(prompts)]
    results = await asyncio.gather(*map(engine.sample, requests))
    for request, result in zip(requests, results, strict=True):
        for sequence in result.sequences:
            assert_recorded(request.prompt_ids, sequence)
    assert engine.stats.num_reused > 0
    longer = token_ids([*prompts[1], *results[1].sequences[0].completion_ids, 5, 6])
    (second,) = (await engine.sample(SampleRequest(request_id="2nd", prompt_ids=longer, params=PARAMS))).sequences
    assert_recorded(longer, second)
    await engine.close()


async def test_a_stream_brings_experts_with_its_last_chunk():
    engine = make_engine()
    request = SampleRequest(request_id="a", prompt_ids=token_ids(range(3, 9)), params=PARAMS)
    chunks = [chunk async for chunk in engine.stream(request)]
    assert all(chunk.routed_experts is None for chunk in chunks[:-1])
    assert_recorded(request.prompt_ids, SampleChunk.join(chunks, params=SamplingParams()))
    await engine.close()


async def test_experts_come_only_where_they_are_asked_for():
    engine = make_engine()
    request = SampleRequest(request_id="a", prompt_ids=token_ids(range(3, 9)), params=SamplingParams(max_tokens=3))
    (sequence,) = (await engine.sample(request)).sequences
    assert sequence.routed_experts is None
    await engine.close()


async def test_an_engine_that_does_not_record_them_refuses_to_return_them():
    engine = TransformersEngine(tiny_model("qwen3_moe"))
    request = SampleRequest(request_id="a", prompt_ids=token_ids([3]), params=PARAMS)
    with pytest.raises(SamplingError, match=r"return_routed_experts needs .* started without records_routing=True"):
        await engine.sample(request)
    await engine.close()


def test_a_model_without_experts_cannot_record_them():
    with pytest.raises(InvalidInputError, match="Qwen3ForCausalLM has no routers"):
        TransformersEngine(tiny_model("qwen3"), config=RECORDING)
