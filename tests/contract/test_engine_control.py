"""Requests that are aborted, cancelled or paused, and closed engines, whichever engine it is."""

from __future__ import annotations

import asyncio
import time

import pytest

from support.engine_subjects import PROMPT_IDS, SCRIPTED_QUEUE_S, Subject, ask, sample_one
from unbroken.engines.base import PausableEngine, ScoringEngine, StreamingEngine
from unbroken.errors import EngineError, SamplingError
from unbroken.types import FinishReason, SampleChunk, SampleRequest, SamplingParams

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards(subject: Subject) -> None:
    first = asyncio.create_task(subject.engine.sample(ask("a", max_tokens=30)))
    await subject.wait_for_ids(1)
    with pytest.raises(SamplingError, match="'a' is in use"):
        await subject.engine.sample(ask("a"))
    await first
    await subject.engine.sample(ask("a", max_tokens=2))


async def test_an_aborted_request_returns_what_it_has(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.sample(ask("a", max_tokens=250)))
    await subject.wait_for_ids(5)
    await subject.engine.abort("a")
    (sequence,) = (await running).sequences
    assert sequence.finish_reason is FinishReason.ABORT
    assert 5 <= len(sequence.completion_ids) < 250


@pytest.mark.engine(kind=PausableEngine)
async def test_a_request_aborted_before_its_first_id_is_empty(subject: Subject) -> None:
    await subject.engine.pause()
    waiting = asyncio.create_task(subject.engine.sample(ask("a", n=2)))
    await asyncio.sleep(0.01)
    await subject.engine.abort("a")
    result = await waiting
    assert [len(sequence.completion_ids) for sequence in result.sequences] == [0, 0]
    assert {sequence.finish_reason for sequence in result.sequences} == {FinishReason.ABORT}


async def test_aborting_an_unknown_request_does_nothing(subject: Subject) -> None:
    await subject.engine.abort("nobody")
    result = await subject.engine.sample(ask("a"))
    assert result.sequences[0].finish_reason is not FinishReason.ABORT


async def test_a_cancelled_call_aborts_its_request(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.sample(ask("a", max_tokens=250)))
    await subject.wait_for_ids(3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await subject.engine.abort("nobody")  # the engine is past the cancellation once it has answered this
    before = subject.num_sampled()
    await asyncio.sleep(0.02)
    assert subject.num_sampled() == before
    await subject.engine.sample(ask("a", max_tokens=2))


@pytest.mark.engine(kind=PausableEngine)
async def test_a_paused_engine_samples_nothing_and_goes_on_where_it_was(subject: Subject) -> None:
    free = await sample_one(subject, ask("a", max_tokens=100))
    running = asyncio.create_task(sample_one(subject, ask("b", max_tokens=100)))
    await subject.wait_for_ids(3)
    await subject.engine.pause()
    await subject.engine.pause()
    before = subject.num_sampled()
    await asyncio.sleep(0.02)
    assert subject.num_sampled() == before
    assert not running.done()
    await subject.engine.resume()
    assert (await running).completion_ids.tolist() == free.completion_ids.tolist()


@pytest.mark.engine(kind=PausableEngine)
@pytest.mark.engine(kind=StreamingEngine)
async def test_the_time_in_the_queue_is_reported_without_the_time_of_sampling(subject: Subject) -> None:
    began_s = time.monotonic()
    before = await sample_one(subject, ask("a", max_tokens=2))
    took_s = time.monotonic() - began_s
    await subject.engine.pause()
    whole = asyncio.create_task(sample_one(subject, ask("b", max_tokens=100)))
    streamed = asyncio.create_task(_collect(subject, ask("c", max_tokens=100)))
    await asyncio.sleep(SCRIPTED_QUEUE_S + 0.5)
    await subject.engine.resume()
    chunks = await streamed
    assert [chunk.queue_s is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    for sequence in (await whole, SampleChunk.join(chunks, params=SamplingParams())):
        assert sequence.queue_s is not None
        assert SCRIPTED_QUEUE_S <= sequence.queue_s < 60
    assert before.queue_s is not None
    assert 0 <= before.queue_s <= max(SCRIPTED_QUEUE_S, took_s)


async def _collect(subject: Subject, request: SampleRequest) -> list[SampleChunk]:
    return [chunk async for chunk in subject.engine.stream(request)]


@pytest.mark.engine(kind=StreamingEngine)
async def test_leaving_a_stream_aborts_its_request(subject: Subject) -> None:
    async for _ in subject.engine.stream(ask("a", max_tokens=250)):
        break
    await subject.engine.abort("nobody")
    await asyncio.sleep(0.05)
    before = subject.num_sampled()
    await asyncio.sleep(0.05)
    assert subject.num_sampled() == before
    await subject.engine.sample(ask("a", max_tokens=2))


@pytest.mark.engine(kind=StreamingEngine)
async def test_an_aborted_stream_ends_with_abort(subject: Subject) -> None:
    chunks = []
    async for chunk in subject.engine.stream(ask("a", max_tokens=250)):
        chunks.append(chunk)
        if len(chunks) == 3:
            await subject.engine.abort("a")
    assert chunks[-1].finish_reason is FinishReason.ABORT
    assert len(SampleChunk.join(chunks, params=SamplingParams()).completion_ids) < 250


async def test_closing_aborts_what_runs_and_refuses_what_comes(own_subject: Subject) -> None:
    assert own_subject.engine.policy_version == 0
    running = asyncio.create_task(sample_one(own_subject, ask(max_tokens=250)))
    await own_subject.wait_for_ids(2)
    await own_subject.engine.check_health()
    await own_subject.engine.close()
    await own_subject.engine.close()
    with pytest.raises(EngineError, match="closed"):
        await own_subject.engine.check_health()
    assert (await running).finish_reason is FinishReason.ABORT
    with pytest.raises(EngineError, match="closed"):
        await own_subject.engine.sample(ask("b"))
    if isinstance(own_subject.engine, ScoringEngine):
        with pytest.raises(EngineError, match="closed"):
            await own_subject.engine.score(PROMPT_IDS)
