"""Sampling, whichever engine or server it is: whole completions and streams."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.engine_subjects import CONTEXT_LENGTH, PROMPT_IDS, VOCAB_SIZE, Subject, ask, sample_one
from unbroken.engines.base import Engine, PausableEngine, StreamingEngine
from unbroken.errors import ContextOverflowError, SamplingError
from unbroken.types import FinishReason, SampleChunk, SamplingParams, token_ids

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_it_is_an_engine(sampler: Subject) -> None:
    assert isinstance(sampler.engine, Engine)
    assert sampler.engine.context_length == CONTEXT_LENGTH
    assert sampler.engine.vocab_size >= VOCAB_SIZE


async def test_i2_every_sampled_id_has_a_finite_logprob_and_a_version(sampler: Subject) -> None:
    sequence = await sample_one(sampler, ask(max_tokens=9))
    assert len(sequence.completion_ids) == 9
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.rollout_logprobs.shape == (9,)
    assert (sequence.rollout_logprobs <= 0).all()
    assert sequence.policy_versions.tolist() == [sampler.engine.policy_version] * 9
    assert sequence.completion_ids.max() < VOCAB_SIZE


async def test_i3_the_prompt_comes_back_as_it_was_sent(sampler: Subject) -> None:
    result = await sampler.engine.sample(ask(max_tokens=3))
    assert result.prompt_ids.tolist() == PROMPT_IDS.tolist()


async def test_n_completions_come_back_in_one_result(sampler: Subject) -> None:
    request = ask(n=3, max_tokens=4)
    result = await sampler.engine.sample(request)
    result.check_answers(request)
    assert [len(sequence.completion_ids) for sequence in result.sequences] == [4, 4, 4]


async def test_a_seed_repeats_a_completion(sampler: Subject) -> None:
    first = await sample_one(sampler, ask("a", max_tokens=12, seed=3))
    second = await sample_one(sampler, ask("b", max_tokens=12, seed=3))
    assert first.completion_ids.tolist() == second.completion_ids.tolist()


async def test_a_sampled_stop_id_is_the_last_id(sampler: Subject) -> None:
    free = (await sample_one(sampler, ask("a", max_tokens=20))).completion_ids.tolist()
    stop_id = free[11]
    stopped = await sample_one(sampler, ask("b", max_tokens=20, stop_token_ids=(stop_id,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.completion_ids.tolist() == free[: free.index(stop_id) + 1]


async def test_a_stop_id_at_max_tokens_is_a_stop(sampler: Subject) -> None:
    free = (await sample_one(sampler, ask("a", max_tokens=5))).completion_ids.tolist()
    number = free.index(free[4]) + 1
    stopped = await sample_one(sampler, ask("b", max_tokens=number, stop_token_ids=(free[4],)))
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.completion_ids) == number


async def test_the_end_of_the_context_ends_a_completion_with_length(sampler: Subject) -> None:
    prompt_ids = np.ones(CONTEXT_LENGTH - 4, dtype=np.int32)
    sequence = await sample_one(sampler, ask(prompt_ids=prompt_ids, max_tokens=100))
    assert len(sequence.completion_ids) == 4
    assert sequence.finish_reason is FinishReason.LENGTH


async def test_a_prompt_that_fills_the_context_is_refused(sampler: Subject) -> None:
    with pytest.raises(ContextOverflowError, match=f"{CONTEXT_LENGTH} tokens"):
        await sampler.engine.sample(ask(prompt_ids=np.ones(CONTEXT_LENGTH, dtype=np.int32)))


@pytest.mark.parametrize("bad", [{"prompt_ids": token_ids([1, VOCAB_SIZE])}, {"stop_token_ids": (VOCAB_SIZE,)}])
async def test_ids_outside_the_vocabulary_are_refused(sampler: Subject, bad: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"got {VOCAB_SIZE}"):
        await sampler.engine.sample(ask(**bad))


async def test_the_temperature_of_the_logprobs_is_reported(sampler: Subject) -> None:
    assert (await sample_one(sampler, ask("a", max_tokens=2, temperature=0.7))).temperature == 0.7
    assert (await sample_one(sampler, ask("b", max_tokens=2, temperature=0))).temperature == 1.0


@pytest.mark.engine(kind=StreamingEngine)
async def test_chunks_of_a_stream_join_to_what_sample_returns(sampler: Subject) -> None:
    request = ask(n=3, max_tokens=9, num_top_logprobs=2)
    whole = await sampler.engine.sample(request)
    chunks: list[list[SampleChunk]] = [[], [], []]
    async for chunk in sampler.engine.stream(request):
        chunks[chunk.index].append(chunk)
    for own, sequence in zip(chunks, whole.sequences, strict=True):
        assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
        joined = SampleChunk.join(own, params=SamplingParams())
        assert joined.completion_ids.tolist() == sequence.completion_ids.tolist()
        np.testing.assert_allclose(joined.rollout_logprobs, sequence.rollout_logprobs, atol=1e-5)
        assert (joined.finish_reason, joined.version_spans) == (sequence.finish_reason, sequence.version_spans)
        assert joined.top_logprobs is not None
        assert joined.top_logprobs.token_ids.shape == (9, 2)


@pytest.mark.engine(kind=StreamingEngine)
async def test_a_stream_brings_ids_before_it_ends(sampler: Subject) -> None:
    stream = sampler.engine.stream(ask(max_tokens=200))
    first = await anext(stream)
    assert len(first.completion_ids) >= 1
    assert first.finish_reason is None
    await stream.aclose()


@pytest.mark.engine(kind=StreamingEngine)
async def test_a_stream_refuses_what_sample_refuses(sampler: Subject) -> None:
    with pytest.raises(ContextOverflowError):
        await anext(sampler.engine.stream(ask(prompt_ids=np.ones(CONTEXT_LENGTH, dtype=np.int32))))


async def test_top_logprobs_are_the_most_likely_ids_first(sampler: Subject) -> None:
    sequence = await sample_one(sampler, ask(max_tokens=6, temperature=0.8, num_top_logprobs=4))
    top = sequence.top_logprobs
    assert top is not None
    assert top.token_ids.shape == (6, 4)
    assert (top.logprobs[:, :-1] >= top.logprobs[:, 1:]).all()
    for row, token_id in enumerate(sequence.completion_ids):
        if token_id in top.token_ids[row]:
            (where,) = np.flatnonzero(top.token_ids[row] == token_id)
            assert top.logprobs[row, where] == pytest.approx(sequence.rollout_logprobs[row], abs=1e-5)
        else:
            assert sequence.rollout_logprobs[row] <= top.logprobs[row, -1]
    assert (await sample_one(sampler, ask("b", max_tokens=2))).top_logprobs is None


@pytest.mark.engine(kind=PausableEngine)
async def test_forgetting_the_prefix_cache_changes_no_completion(subject: Subject) -> None:
    first = await sample_one(subject, ask("a", max_tokens=10))
    await subject.engine.reset_prefix_cache()
    second = await sample_one(subject, ask("b", max_tokens=10))
    assert first.completion_ids.tolist() == second.completion_ids.tolist()


async def test_many_concurrent_requests_each_get_their_own_answer(sampler: Subject) -> None:
    prompts = [np.arange(1 + k % 5, 8 + k, dtype=np.int32) % VOCAB_SIZE for k in range(40)]
    requests = [ask(str(k), prompt_ids=p, max_tokens=1 + k % 7, seed=k) for k, p in enumerate(prompts)]
    results = await asyncio.gather(*(sampler.engine.sample(request) for request in requests))
    for request, result in zip(requests, results, strict=True):
        result.check_answers(request)
        assert len(result.sequences[0].completion_ids) == request.params.max_tokens
