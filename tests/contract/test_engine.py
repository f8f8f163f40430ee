"""What callers may rely on, whichever engine they have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.architectures import tiny_model
from unbroken.engines.base import Engine, SleepingEngine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import ContextOverflowError, EngineError, SamplingError
from unbroken.transfer.sources import TensorSource, WeightSource
from unbroken.types import (
    FinishReason,
    InFlight,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SamplingParams,
    token_ids,
)

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = pytest.mark.asyncio(loop_scope="session")

VOCAB_SIZE = 64
CONTEXT_LENGTH = 256
PROMPT_IDS = token_ids([1, 2, 3, 4, 5])


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    engine: Engine
    num_sampled: Callable[[], int]
    weights: list[tuple[str, Any]]
    """Other weights than it has now."""
    poll_s: float = 0.0
    """How long to wait between two looks at the number of ids; a spinning loop would keep other processes waiting."""

    async def wait_for_ids(self, number: int) -> None:
        until = self.num_sampled() + number
        async with asyncio.timeout(20):
            while self.num_sampled() < until:  # noqa: ASYNC110  # engines announce no single ids
                await asyncio.sleep(self.poll_s)


def scripted() -> Subject:
    def script(prompt_ids: Any) -> list[int]:
        return np.random.default_rng(int(prompt_ids.sum())).integers(0, VOCAB_SIZE, CONTEXT_LENGTH).tolist()

    engine = ScriptedEngine(script, context_length=CONTEXT_LENGTH, vocab_size=VOCAB_SIZE)
    return Subject(engine=engine, num_sampled=lambda: engine.num_sampled, weights=[])


def embedded() -> Subject:
    engine = TransformersEngine(
        tiny_model(), config=TransformersEngineConfig(max_batch=8, context_length=CONTEXT_LENGTH)
    )
    weights = list(tiny_model(seed=1).named_parameters())
    return Subject(engine=engine, num_sampled=lambda: engine.stats.num_sampled, weights=weights)


def on_vllm(engine: Any) -> Subject:
    """vLLM samples in other processes: ids are counted when their step is known here."""
    from support.vllm_engines import tiny_vllm_model

    weights = list(tiny_vllm_model(seed=engine.policy_version + 1).named_parameters())
    return Subject(engine=engine, num_sampled=lambda: engine.num_sampled, weights=weights, poll_s=0.001)


@pytest.fixture
def scripted_subject() -> Subject:
    return scripted()


@pytest.fixture
def embedded_subject() -> Subject:
    return embedded()


@pytest.fixture
def vllm_subject(shared_vllm: Any) -> Subject:
    return on_vllm(shared_vllm.engine)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh_vllm_subject(tmp_path: Path) -> Subject:
    from support.vllm_engines import save_model, start_engine, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model())
    return on_vllm(await start_engine(tmp_path))


@pytest.fixture(params=["scripted_subject", "embedded_subject", "vllm_subject"])
def any_subject(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def subject(any_subject: Subject, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """An engine that may be any, and may serve other tests too: it is left running, with whatever weights."""
    yield any_subject
    if "vllm" in request.node.callspec.id:
        await any_subject.engine.abort("a")
        await any_subject.engine.resume()
    else:
        await any_subject.engine.close()


@pytest.fixture(params=["scripted_subject", "embedded_subject", "fresh_vllm_subject"])
def own_subject(request: pytest.FixtureRequest) -> Any:
    """An engine of the test's own, which it closes."""
    return request.getfixturevalue(request.param)


def ask(request_id: str = "a", *, n: int = 1, prompt_ids: Any = PROMPT_IDS, **params: Any) -> SampleRequest:
    params.setdefault("seed", 7)
    return SampleRequest(request_id=request_id, prompt_ids=prompt_ids, n=n, params=SamplingParams(**params))


async def sample_one(subject: Subject, request: SampleRequest) -> SampledSequence:
    result = await subject.engine.sample(request)
    result.check_answers(request)
    return result.sequences[0]


async def test_it_is_an_engine(subject: Subject) -> None:
    assert isinstance(subject.engine, Engine)
    assert subject.engine.context_length == CONTEXT_LENGTH
    assert subject.engine.vocab_size >= VOCAB_SIZE
    assert subject.engine.world_size == 1


async def test_i2_every_sampled_id_has_a_finite_logprob_and_a_version(subject: Subject) -> None:
    sequence = await sample_one(subject, ask(max_tokens=9))
    assert len(sequence.completion_ids) == 9
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.rollout_logprobs.shape == (9,)
    assert (sequence.rollout_logprobs <= 0).all()
    assert sequence.policy_versions.tolist() == [subject.engine.policy_version] * 9
    assert sequence.completion_ids.max() < VOCAB_SIZE


async def test_i3_the_prompt_comes_back_as_it_was_sent(subject: Subject) -> None:
    result = await subject.engine.sample(ask(max_tokens=3))
    assert result.prompt_ids.tolist() == PROMPT_IDS.tolist()


async def test_n_completions_come_back_in_one_result(subject: Subject) -> None:
    request = ask(n=3, max_tokens=4)
    result = await subject.engine.sample(request)
    result.check_answers(request)
    assert [len(sequence.completion_ids) for sequence in result.sequences] == [4, 4, 4]


async def test_a_seed_repeats_a_completion(subject: Subject) -> None:
    first = await sample_one(subject, ask("a", max_tokens=12, seed=3))
    second = await sample_one(subject, ask("b", max_tokens=12, seed=3))
    assert first.completion_ids.tolist() == second.completion_ids.tolist()


async def test_a_sampled_stop_id_is_the_last_id(subject: Subject) -> None:
    free = (await sample_one(subject, ask("a", max_tokens=20))).completion_ids.tolist()
    stop_id = free[11]
    stopped = await sample_one(subject, ask("b", max_tokens=20, stop_token_ids=(stop_id,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.completion_ids.tolist() == free[: free.index(stop_id) + 1]


async def test_a_stop_id_at_max_tokens_is_a_stop(subject: Subject) -> None:
    free = (await sample_one(subject, ask("a", max_tokens=5))).completion_ids.tolist()
    number = free.index(free[4]) + 1
    stopped = await sample_one(subject, ask("b", max_tokens=number, stop_token_ids=(free[4],)))
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.completion_ids) == number


async def test_the_end_of_the_context_ends_a_completion_with_length(subject: Subject) -> None:
    prompt_ids = np.ones(CONTEXT_LENGTH - 4, dtype=np.int32)
    sequence = await sample_one(subject, ask(prompt_ids=prompt_ids, max_tokens=100))
    assert len(sequence.completion_ids) == 4
    assert sequence.finish_reason is FinishReason.LENGTH


async def test_a_prompt_that_fills_the_context_is_refused(subject: Subject) -> None:
    with pytest.raises(ContextOverflowError, match=f"{CONTEXT_LENGTH} tokens"):
        await subject.engine.sample(ask(prompt_ids=np.ones(CONTEXT_LENGTH, dtype=np.int32)))


@pytest.mark.parametrize("bad", [{"prompt_ids": token_ids([1, VOCAB_SIZE])}, {"stop_token_ids": (VOCAB_SIZE,)}])
async def test_ids_outside_the_vocabulary_are_refused(subject: Subject, bad: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"got {VOCAB_SIZE}"):
        await subject.engine.sample(ask(**bad))


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards(subject: Subject) -> None:
    first = asyncio.create_task(subject.engine.sample(ask("a", max_tokens=30)))
    await subject.wait_for_ids(1)
    with pytest.raises(SamplingError, match="'a' is in use"):
        await subject.engine.sample(ask("a"))
    await first
    await subject.engine.sample(ask("a", max_tokens=2))


async def test_the_temperature_of_the_logprobs_is_reported(subject: Subject) -> None:
    assert (await sample_one(subject, ask("a", max_tokens=2, temperature=0.7))).temperature == 0.7
    assert (await sample_one(subject, ask("b", max_tokens=2, temperature=0))).temperature == 1.0


async def test_an_aborted_request_returns_what_it_has(subject: Subject) -> None:
    running = asyncio.create_task(subject.engine.sample(ask("a", max_tokens=250)))
    await subject.wait_for_ids(5)
    await subject.engine.abort("a")
    (sequence,) = (await running).sequences
    assert sequence.finish_reason is FinishReason.ABORT
    assert 5 <= len(sequence.completion_ids) < 250


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


async def test_an_engine_falls_asleep_when_its_requests_have_finished_and_answers_none_until_new_weights(
    subject: Subject,
) -> None:
    engine, version = subject.engine, subject.engine.policy_version
    assert isinstance(engine, SleepingEngine)
    running = asyncio.create_task(sample_one(subject, ask("a", max_tokens=100)))
    await subject.wait_for_ids(3)
    await engine.sleep()
    await engine.sleep()
    assert len((await running).completion_ids) == 100
    await engine.check_health()
    stream = engine.stream(ask("b"))
    calls = (engine.sample(ask("b")), anext(stream), engine.score(PROMPT_IDS), engine.pause(), engine.resume())
    for call in (*calls, engine.reset_prefix_cache()):
        with pytest.raises(EngineError, match="sleeps while the trainer has its memory"):
            await call
    await engine.abort("a")
    with pytest.raises(SamplingError, match="must rise above"):
        await engine.update_weights(TensorSource(subject.weights), policy_version=version)
    with pytest.raises(EngineError, match="sleeps"):
        await engine.sample(ask("b"))
    await engine.update_weights(TensorSource(subject.weights), policy_version=version + 1)
    later = await sample_one(subject, ask("b", max_tokens=9))
    assert later.policy_versions.tolist() == [version + 1] * 9


async def test_requests_that_come_while_an_engine_falls_asleep_are_refused_and_a_cancelled_sleep_wakes_it(
    subject: Subject,
) -> None:
    assert isinstance(subject.engine, SleepingEngine)
    running = asyncio.create_task(sample_one(subject, ask("a", max_tokens=250)))
    await subject.wait_for_ids(3)
    falling = asyncio.create_task(subject.engine.sleep())
    await asyncio.sleep(0.002)
    with pytest.raises(EngineError, match="sleeps"):
        await subject.engine.sample(ask("b"))
    assert not running.done()
    falling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await falling
    assert len((await sample_one(subject, ask("b", max_tokens=2))).completion_ids) == 2
    assert (await running).finish_reason is FinishReason.LENGTH


async def test_weights_that_come_while_an_engine_falls_asleep_do_not_keep_it_awake(subject: Subject) -> None:
    engine, version = subject.engine, subject.engine.policy_version
    assert isinstance(engine, SleepingEngine)
    running = asyncio.create_task(sample_one(subject, ask("a", max_tokens=250)))
    await subject.wait_for_ids(3)
    falling = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0)
    await engine.update_weights(TensorSource(subject.weights), policy_version=version + 1)
    for _ in range(2):
        with pytest.raises(EngineError, match="sleeps"):
            await engine.sample(ask("b"))
        await falling
    await engine.update_weights(TensorSource(subject.weights), policy_version=version + 2)
    await engine.sample(ask("b", max_tokens=2))
    assert len((await running).completion_ids) == 250


async def test_a_paused_engine_does_not_sleep(subject: Subject) -> None:
    assert isinstance(subject.engine, SleepingEngine)
    await subject.engine.pause()
    with pytest.raises(EngineError, match="resume it"):
        await subject.engine.sleep()
    await subject.engine.resume()
    await subject.engine.sample(ask("a", max_tokens=2))


@pytest.mark.parametrize("make", [scripted, embedded])
async def test_a_sleeping_engine_can_be_closed(make: Callable[[], Subject]) -> None:
    engine = make().engine
    assert isinstance(engine, SleepingEngine)
    await engine.sleep()
    await engine.close()
    for call in (engine.sleep(), engine.sample(ask("a"))):
        with pytest.raises(EngineError, match="closed"):
            await call


async def test_i6_weights_that_change_in_mid_sequence_split_its_versions(subject: Subject) -> None:
    before = subject.engine.policy_version
    running = asyncio.create_task(sample_one(subject, ask(max_tokens=200)))
    await subject.wait_for_ids(3)
    await subject.engine.update_weights(TensorSource(subject.weights), policy_version=before + 4)
    assert subject.engine.policy_version == before + 4
    sequence = await running
    assert [span.policy_version for span in sequence.version_spans] == [before, before + 4]
    assert sequence.version_spans[0].stop >= 3
    later = await sample_one(subject, ask("b", max_tokens=2))
    assert later.policy_versions.tolist() == [before + 4] * 2


async def test_i6_requests_in_flight_can_finish_with_the_old_weights(subject: Subject) -> None:
    before = subject.engine.policy_version
    running = asyncio.create_task(sample_one(subject, ask("a", max_tokens=150)))
    await subject.wait_for_ids(3)
    update = asyncio.create_task(
        subject.engine.update_weights(
            TensorSource(subject.weights), policy_version=before + 1, in_flight=InFlight.FINISH
        )
    )
    others = []
    while not update.done():
        others.append(asyncio.create_task(sample_one(subject, ask(f"b{len(others)}", max_tokens=20))))
        await asyncio.sleep(0.01)
    await update
    assert [span.policy_version for span in (await running).version_spans] == [before]
    for other in others:
        assert len((await other).version_spans) == 1
    later = await sample_one(subject, ask("c", max_tokens=2))
    assert later.policy_versions.tolist() == [before + 1] * 2


async def test_requests_cannot_finish_before_an_update_of_a_paused_engine(subject: Subject) -> None:
    before = subject.engine.policy_version
    await subject.engine.pause()
    with pytest.raises(SamplingError, match="in_flight must be 'pause' while the engine is paused"):
        await subject.engine.update_weights(
            TensorSource(subject.weights), policy_version=before + 1, in_flight=InFlight.FINISH
        )
    await subject.engine.resume()
    assert subject.engine.policy_version == before


async def test_a_source_of_weights_that_the_engine_does_not_take_is_refused_by_name(subject: Subject) -> None:
    class Carrier(WeightSource):
        pass

    before = subject.engine.policy_version
    with pytest.raises(SamplingError, match=r"source must be one of .*TensorSource for this engine, got Carrier"):
        await subject.engine.update_weights(Carrier(), policy_version=before + 1)
    assert subject.engine.policy_version == before


async def test_i6_a_version_that_does_not_rise_is_refused(subject: Subject) -> None:
    new = subject.engine.policy_version + 2
    await subject.engine.update_weights(TensorSource(subject.weights), policy_version=new)
    for version in (new, new - 1):
        with pytest.raises(SamplingError, match=f"must rise above {new}"):
            await subject.engine.update_weights(TensorSource(subject.weights), policy_version=version)
    assert subject.engine.policy_version == new


@pytest.mark.parametrize("version", [1.5, True, 2**31, "1"])
async def test_i6_a_version_that_is_no_version_is_refused(subject: Subject, version: Any) -> None:
    before = subject.engine.policy_version
    with pytest.raises(SamplingError, match=r"policy_version must be a whole number in \[0, 2\*\*31\), got"):
        await subject.engine.update_weights(TensorSource(subject.weights), policy_version=version)
    assert subject.engine.policy_version == before


async def test_score_gives_one_logprob_for_each_id_after_the_first(subject: Subject) -> None:
    logprobs = (await subject.engine.score(PROMPT_IDS)).logprobs
    assert logprobs.shape == (4,)
    assert (logprobs <= 0).all()
    assert (await subject.engine.score(PROMPT_IDS[:1])).logprobs.shape == (0,)


@pytest.mark.parametrize(
    ("bad_ids", "temperature"),
    [
        ([], 1.0),
        ([VOCAB_SIZE], 1.0),
        ([1] * (CONTEXT_LENGTH + 1), 1.0),
        *(([1, 2], temperature) for temperature in (0.0, 1e-40, 1e300, float("nan"), None)),
    ],
)
async def test_what_cannot_be_scored_is_refused(subject: Subject, bad_ids: list[int], temperature: Any) -> None:
    with pytest.raises(SamplingError):
        await subject.engine.score(token_ids(bad_ids), temperature=temperature)


async def test_chunks_of_a_stream_join_to_what_sample_returns(subject: Subject) -> None:
    request = ask(n=3, max_tokens=9, num_top_logprobs=2)
    whole = await subject.engine.sample(request)
    chunks: list[list[SampleChunk]] = [[], [], []]
    async for chunk in subject.engine.stream(request):
        chunks[chunk.index].append(chunk)
    for own, sequence in zip(chunks, whole.sequences, strict=True):
        assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
        joined = SampleChunk.join(own, temperature=1.0)
        assert joined.completion_ids.tolist() == sequence.completion_ids.tolist()
        np.testing.assert_allclose(joined.rollout_logprobs, sequence.rollout_logprobs, atol=1e-5)
        assert (joined.finish_reason, joined.version_spans) == (sequence.finish_reason, sequence.version_spans)
        assert joined.top_logprobs is not None
        assert joined.top_logprobs.token_ids.shape == (9, 2)


async def test_a_stream_brings_ids_before_it_ends(subject: Subject) -> None:
    stream = subject.engine.stream(ask(max_tokens=200))
    first = await anext(stream)
    assert len(first.completion_ids) >= 1
    assert first.finish_reason is None
    await stream.aclose()


async def test_leaving_a_stream_aborts_its_request(subject: Subject) -> None:
    async for _ in subject.engine.stream(ask("a", max_tokens=250)):
        break
    await subject.engine.abort("nobody")
    await asyncio.sleep(0.05)
    before = subject.num_sampled()
    await asyncio.sleep(0.05)
    assert subject.num_sampled() == before
    await subject.engine.sample(ask("a", max_tokens=2))


async def test_a_stream_refuses_what_sample_refuses(subject: Subject) -> None:
    with pytest.raises(ContextOverflowError):
        await anext(subject.engine.stream(ask(prompt_ids=np.ones(CONTEXT_LENGTH, dtype=np.int32))))


async def test_an_aborted_stream_ends_with_abort(subject: Subject) -> None:
    chunks = []
    async for chunk in subject.engine.stream(ask("a", max_tokens=250)):
        chunks.append(chunk)
        if len(chunks) == 3:
            await subject.engine.abort("a")
    assert chunks[-1].finish_reason is FinishReason.ABORT
    assert len(SampleChunk.join(chunks, temperature=1.0).completion_ids) < 250


async def test_top_logprobs_are_the_most_likely_ids_first(subject: Subject) -> None:
    sequence = await sample_one(subject, ask(max_tokens=6, temperature=0.8, num_top_logprobs=4))
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
    assert (await sample_one(subject, ask("b", max_tokens=2))).top_logprobs is None


async def test_scoring_gives_the_most_likely_ids_where_asked(subject: Subject) -> None:
    scored = await subject.engine.score(PROMPT_IDS, temperature=0.7, num_top_logprobs=3)
    assert scored.top_logprobs is not None
    assert scored.top_logprobs.logprobs.shape == (4, 3)
    assert (scored.logprobs <= scored.top_logprobs.logprobs[:, 0] + 1e-6).all()


async def test_forgetting_the_prefix_cache_changes_no_completion(subject: Subject) -> None:
    first = await sample_one(subject, ask("a", max_tokens=10))
    await subject.engine.reset_prefix_cache()
    second = await sample_one(subject, ask("b", max_tokens=10))
    assert first.completion_ids.tolist() == second.completion_ids.tolist()


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
    with pytest.raises(EngineError, match="closed"):
        await own_subject.engine.score(PROMPT_IDS)


async def test_many_concurrent_requests_each_get_their_own_answer(subject: Subject) -> None:
    prompts = [np.arange(1 + k % 5, 8 + k, dtype=np.int32) % VOCAB_SIZE for k in range(40)]
    requests = [ask(str(k), prompt_ids=p, max_tokens=1 + k % 7, seed=k) for k, p in enumerate(prompts)]
    results = await asyncio.gather(*(subject.engine.sample(request) for request in requests))
    for request, result in zip(requests, results, strict=True):
        result.check_answers(request)
        assert len(result.sequences[0].completion_ids) == request.params.max_tokens
