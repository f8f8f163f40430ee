"""Weights that a trainer sends to vLLM's workers: whole and fenced, or nothing is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.servers import listening, make_app
from support.waits import wait_until
from unbroken.client import AsyncClient
from unbroken.errors import EngineError, IncompleteWeightsError
from unbroken.types import InFlight, SampledSequence, SampleRequest, SamplingParams, token_ids
from unbroken.weights.broadcast import BroadcastPublisher
from unbroken.weights.files import write_weights
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_IDS = token_ids([1, 2, 3, 4, 5])


async def sample_one(engine: Any, request_id: str = "a", **params: Any) -> SampledSequence:
    request = SampleRequest(request_id=request_id, prompt_ids=PROMPT_IDS, params=SamplingParams(**params))
    return (await engine.sample(request)).sequences[0]


async def greedy_of(model: Any, length: int) -> list[int]:
    """What an engine that was started on these weights would sample."""
    ids = model.generate(
        model.dummy_inputs["input_ids"].new_tensor([PROMPT_IDS.tolist()]),
        do_sample=False,
        max_new_tokens=length,
        min_new_tokens=length,
    )
    found: list[int] = ids[0, len(PROMPT_IDS) :].tolist()
    return found


@asynccontextmanager
async def publisher_to(engine: Any, **options: Any) -> AsyncIterator[BroadcastPublisher]:
    async with listening(make_app(engine)) as url, AsyncClient(url, max_retries=0) as client:
        publisher = BroadcastPublisher([client], **{"bucket_bytes": 4096, "timeout_s": 20.0, **options})
        yield publisher
        publisher.close()


async def test_i6_greedy_outputs_after_an_update_are_those_of_the_new_weights(shared_vllm: Any) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    async with publisher_to(engine) as publisher:
        for seed in (41, 42):
            new = tiny_vllm_model(seed)
            version = engine.policy_version + 1
            update = await publisher.publish(new.named_parameters(), policy_version=version)
            sequence = await sample_one(engine, temperature=0.0, max_tokens=40)
            assert sequence.completion_ids.tolist() == await greedy_of(new, 40)
            assert set(sequence.policy_versions.tolist()) == {version}
            assert update.phases_s.keys() == {"start", "send", "finish"}


@pytest.mark.parametrize("in_flight", list(InFlight))
async def test_i6_an_update_in_mid_generation_splits_a_sequence_or_waits_for_its_end(
    shared_vllm: Any, in_flight: InFlight
) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    before = engine.policy_version
    async with publisher_to(engine, in_flight=in_flight) as publisher:
        running = asyncio.create_task(sample_one(engine, temperature=0.0, max_tokens=240))
        sampled = engine.num_sampled
        await wait_until(lambda: engine.num_sampled >= sampled + 5)
        await publisher.publish(tiny_vllm_model(43).named_parameters(), policy_version=before + 1)
        versions = [span.policy_version for span in (await running).version_spans]
    assert versions == ([before, before + 1] if in_flight is InFlight.PAUSE else [before])
    assert engine.policy_version == before + 1


async def test_i6_a_broadcast_that_ends_half_way_stops_the_engine_until_whole_weights_come(
    shared_vllm: Any,
) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    before = engine.policy_version
    async with publisher_to(engine) as publisher:
        broken = [
            (name, _Broken(weight) if number == 5 else weight)
            for number, (name, weight) in enumerate(tiny_vllm_model(44).named_parameters())
        ]
        with pytest.raises(ZeroDivisionError):
            await publisher.publish(broken, policy_version=before + 1)  # type: ignore[arg-type]
        assert engine.policy_version == before
        with pytest.raises(IncompleteWeightsError, match="publish a whole version"):
            await sample_one(engine, temperature=0.0, max_tokens=20)
        new = tiny_vllm_model(45)
        await publisher.publish(new.named_parameters(), policy_version=before + 1)
    assert (await sample_one(engine, temperature=0.0, max_tokens=20)).completion_ids.tolist() == await greedy_of(
        new, 20
    )


class _Broken:
    """A weight that fails when it is sent."""

    def __init__(self, weight: Any) -> None:
        self.dtype, self.shape = weight.dtype, weight.shape

    def detach(self) -> Any:
        raise ZeroDivisionError


async def test_weights_that_are_not_the_models_are_refused_before_anything_is_sent(shared_vllm: Any) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    before = engine.policy_version
    weights = list(tiny_vllm_model(46).named_parameters())
    renamed = [("model.oops", weights[0][1]), *weights[1:]]
    reshaped = [(weights[0][0], weights[0][1][:-1]), *weights[1:]]
    async with publisher_to(engine) as publisher:
        for bad, reason in (
            (renamed, "no weight named 'model.oops'"),
            (reshaped, "must have shape"),
            (weights[1:], "missing"),
        ):
            with pytest.raises(EngineError, match=reason):
                await publisher.publish(bad, policy_version=before + 1)
        with pytest.raises(EngineError, match="must rise above"):
            await publisher.publish(weights, policy_version=before)
        assert engine.policy_version == before
        await publisher.publish(weights, policy_version=before + 1)
    await engine.check_health()


async def test_a_tied_head_may_come_too_but_not_with_other_values(shared_vllm: Any) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    before = engine.policy_version
    new = tiny_vllm_model(47)
    weights = dict(new.named_parameters())
    head = weights["model.embed_tokens.weight"]
    async with publisher_to(engine) as publisher:
        with pytest.raises(EngineError, match="tied in the model, but their values differ"):
            await publisher.publish([*weights.items(), ("lm_head.weight", head * 2)], policy_version=before + 1)
        await publisher.publish([*weights.items(), ("lm_head.weight", head)], policy_version=before + 1)
    sequence = await sample_one(engine, temperature=0.0, max_tokens=20)
    assert sequence.completion_ids.tolist() == await greedy_of(new, 20)


async def test_verified_files_are_read_by_the_workers_themselves(shared_vllm: Any, tmp_path: Path) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    new = tiny_vllm_model(48)
    version = engine.policy_version + 1
    files = write_weights(tmp_path, new.named_parameters(), policy_version=version)
    async with listening(make_app(engine, weights_dir=tmp_path)) as url, AsyncClient(url, max_retries=0) as client:
        assert await client.load_weights(files.folder, policy_version=version)
    sequence = await sample_one(engine, temperature=0.0, max_tokens=20)
    assert sequence.completion_ids.tolist() == await greedy_of(new, 20)


async def test_i6_an_untied_head_and_a_narrower_dtype_arrive_as_well(tmp_path: Path) -> None:
    from support.vllm_engines import save_model, start_engine, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model(0, tied=False))
    engine = await start_engine(tmp_path)
    new = tiny_vllm_model(1, tied=False)
    async with publisher_to(engine) as publisher:
        await publisher.publish(new.named_parameters(), policy_version=1)
        sequence = await sample_one(engine, temperature=0.0, max_tokens=40)
        assert sequence.completion_ids.tolist() == await greedy_of(new, 40)
    async with publisher_to(engine, dtype="bfloat16") as publisher:
        await publisher.publish(new.named_parameters(), policy_version=2)
    expected = (await engine.score(PROMPT_IDS)).logprobs
    await engine.update_weights(
        TensorSource([(name, weight.bfloat16().float()) for name, weight in new.named_parameters()]), policy_version=3
    )
    np.testing.assert_array_equal((await engine.score(PROMPT_IDS)).logprobs, expected)
    await engine.close()
