"""New weights and their versions, whichever engine it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.engine_subjects import Subject, ask, sample_one
from unbroken.engines.base import UpdatableEngine
from unbroken.errors import SamplingError
from unbroken.types import InFlight
from unbroken.weights.sources import TensorSource, WeightSource

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.engine(kind=UpdatableEngine)]


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
    with pytest.raises(SamplingError, match=r"source must be one of .*TensorSource.* for this engine, got Carrier"):
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
