"""The ids that the embedded engine kept are those of the distribution that it drew from, however rows are batched."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.models import tiny_qwen3
from support.reference_sampling import reference_logprobs
from support.waits import wait_until
from unbroken.engines.transformers import TransformersEngine
from unbroken.engines.transformers.sampling import find_kept
from unbroken.types import SampleChunk, SampledSequence, SampleRequest, SamplingParams, token_ids

PARAMS = SamplingParams(max_tokens=9, seed=1, return_kept_ids=True)
CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 5},
    {"top_p": 0.6, "temperature": 0.7},
    {"min_p": 0.4},
    {"top_k": 12, "top_p": 0.7, "min_p": 0.1, "temperature": 2.0},
    {"top_k": 12, "repetition_penalty": 1.5},
)


def assert_kept(model: Any, request: SampleRequest, sequence: SampledSequence) -> None:
    ids = [*request.prompt_ids.tolist(), *sequence.completion_ids.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    sets = sequence.kept_ids.to_lists()
    for position, kept in enumerate(sets):
        length = len(request.prompt_ids) + position
        expected = reference_logprobs(
            logits[length - 1], request.params, ids[: len(request.prompt_ids)], ids[len(request.prompt_ids) : length]
        )
        assert kept == np.flatnonzero(np.isfinite(expected)).tolist()
        assert abs(expected[ids[length]] - sequence.rollout_logprobs[position]) < 1e-5


async def test_sets_are_those_of_the_plain_distribution_in_batches_of_rows_with_other_cuts_and_none():
    model = tiny_qwen3()
    engine = TransformersEngine(model)
    requests = [
        SampleRequest(request_id=str(k), prompt_ids=token_ids(range(1, 4 + k)), params=replace(PARAMS, **cut), n=2)
        for k, cut in enumerate(CUTS)
    ]
    plain = SampleRequest(request_id="plain", prompt_ids=[1, 2], params=PARAMS)
    greedy = SampleRequest(request_id="greedy", prompt_ids=[1, 2], params=replace(PARAMS, top_k=3, temperature=0.0))
    results = await asyncio.gather(*map(engine.sample, [*requests, plain, greedy]))
    for request, result in zip(requests, results, strict=False):
        result.check_answers(request)
        for sequence in result.sequences:
            assert_kept(model, request, sequence)
    assert [result.sequences[0].kept_ids for result in results[-2:]] == [None, None]
    await engine.close()


async def test_a_stream_has_the_sets_of_each_chunk_and_top_logprobs_change_nothing():
    model = tiny_qwen3()
    engine = TransformersEngine(model)
    request = SampleRequest(request_id="a", prompt_ids=[1, 2, 3], params=replace(PARAMS, top_k=4, num_top_logprobs=2))
    (whole,) = (await engine.sample(request)).sequences
    chunks = [chunk async for chunk in engine.stream(request)]
    streamed = SampleChunk.join(chunks, params=SamplingParams())
    assert streamed.kept_ids.to_lists() == whole.kept_ids.to_lists()
    assert all(len(chunk.kept_ids) == len(chunk.completion_ids) for chunk in chunks if len(chunk.completion_ids))
    assert_kept(model, request, whole)
    await engine.close()


async def test_an_aborted_request_has_the_sets_of_what_it_has():
    engine = TransformersEngine(tiny_qwen3())
    request = SampleRequest(request_id="a", prompt_ids=[1, 2], params=replace(PARAMS, top_k=4, max_tokens=900))
    asked = asyncio.create_task(engine.sample(request))
    await wait_until(lambda: engine.stats.num_sampled >= 5)
    await engine.abort("a")
    (sequence,) = (await asked).sequences
    assert len(sequence.kept_ids) == len(sequence.completion_ids) > 0
    await engine.close()


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [([[-1.0, -np.inf, -2.0], [-1.0, -1.0, -1.0], [-np.inf, 0.0, -np.inf]], [[0, 2], [], [1]]), ([[-1.0, -2.0]], [[]])],
)
def test_where_all_ids_are_possible_there_is_no_set(logprobs, expected):
    assert [ids.tolist() for ids in find_kept(torch.tensor(logprobs))] == expected
