"""Sleep, whichever engine it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from support.engine_subjects import PROMPT_IDS, Subject, ask, embedded, sample_one, scripted
from unbroken.engines.base import SleepingEngine
from unbroken.errors import EngineError, SamplingError
from unbroken.types import FinishReason
from unbroken.weights.sources import TensorSource

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.engine(kind=SleepingEngine)]


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
    await asyncio.sleep(subject.poll_s)
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
