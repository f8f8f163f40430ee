"""Weights that come by vLLM's packed broadcast, as TRL sends them since 1.11: one version at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch

from support.servers import asgi_client, listening, make_app, scripted_engine
from support.vllm_session import greedy
from unbroken.engines.base import TransferEngine
from unbroken.errors import IncompleteWeightsError
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.sources import TensorSource, TensorSpec
from unbroken.weights.wire import BufferPacking, unpack

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_IDS = token_ids([1, 2, 3, 4, 5])
MEETING = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
WEIGHT = {"names": ["model.embed_tokens.weight"], "dtype_names": ["float32"], "shapes": [[64, 32]]}


def weights_of(seed: int) -> list[tuple[str, Any]]:
    from support.vllm_engines import tiny_vllm_model

    return list(tiny_vllm_model(seed).named_parameters())


@asynccontextmanager
async def sender_to(url: str, **init_info: Any) -> AsyncIterator[Any]:
    from support.packed_sender import PackedSender

    sender = await asyncio.to_thread(PackedSender, url, **init_info)
    try:
        yield sender
    finally:
        sender.close()


async def waits_for_whole_weights(engine: Any) -> None:
    for call in (engine.check_health(), greedy(engine)):
        with pytest.raises(IncompleteWeightsError, match="publish a whole version"):
            await call


def message(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    text: str = answer.json()["error"]["message"]
    return text


@pytest.mark.parametrize(
    ("init_info", "update_info"),
    [
        ({"packed": True}, {}),
        ({"packed": True, "packed_buffer_size_bytes": 5000}, {}),
        ({}, {"packed": True, "packed_buffer_size_bytes": 5000}),
        ({}, {}),
    ],
    ids=["packed as TRL with vLLM 0.28", "in small chunks", "packed as TRL with vLLM 0.27", "one by one"],
)
async def test_i6_weights_are_sampled_with_as_one_version_when_the_update_is_finished(
    shared_vllm: Any, init_info: dict[str, Any], update_info: dict[str, Any]
) -> None:
    engine = shared_vllm.engine
    assert isinstance(engine, TransferEngine)
    seed = 70 + len(init_info) + 10 * len(update_info)
    before, old, weights = engine.policy_version, await greedy(engine), weights_of(seed)
    async with listening(make_app(engine)) as url, sender_to(url, **init_info) as sender:
        await asyncio.to_thread(sender.start)
        for part in (weights[:5], weights[5:]):
            answer = await asyncio.to_thread(sender.send, part, **update_info)
            assert answer.status_code == 200, answer.text
            assert engine.policy_version == before
        waiting = asyncio.create_task(greedy(engine))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        finished = await asyncio.to_thread(sender.finish)
        assert await waiting == await greedy(engine)
        assert finished.json()["policy_version"] == before + 1
        assert "POST /start_weight_update first" in message(await asyncio.to_thread(sender.finish))
    new = await greedy(engine)
    assert new != old
    await engine.update_weights(TensorSource(weights), policy_version=before + 2)
    assert await greedy(engine) == new


async def test_an_update_without_names_is_like_the_one_before_as_vllm_0_33_sends_it(shared_vllm: Any) -> None:
    engine = shared_vllm.engine
    first, second = weights_of(91), weights_of(92)
    nothing: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
    async with listening(make_app(engine)) as url, sender_to(url, packed=True) as sender:
        await asyncio.to_thread(sender.start)
        refused = await asyncio.to_thread(sender.http.post, "/update_weights", json={"update_info": nothing})
        assert "must not be empty in a trainer's first update" in message(refused)
        for weights, info in ((first, {}), (second, nothing)):
            await asyncio.to_thread(sender.start)
            answer = await asyncio.to_thread(sender.send, weights, **info)
            assert answer.status_code == 200, answer.text
            finished = await asyncio.to_thread(sender.finish)
            assert finished.status_code == 200, finished.text
    before, new = engine.policy_version, await greedy(engine)
    await engine.update_weights(TensorSource(second), policy_version=before + 1)
    assert await greedy(engine) == new


async def test_i6_a_paused_request_goes_on_with_the_new_weights(shared_vllm: Any) -> None:
    """As TRL's asynchronous trainers update: pause, update, resume."""
    engine = shared_vllm.engine
    before, weights = engine.policy_version, weights_of(86)
    params = SamplingParams(temperature=0.0, max_tokens=200)
    request = SampleRequest(request_id="long", prompt_ids=PROMPT_IDS, params=params)
    async with listening(make_app(engine)) as url, sender_to(url, packed=True) as sender:
        stream = engine.stream(request)
        versions = [span.policy_version for span in (await anext(stream)).version_spans]
        await asyncio.to_thread(sender.post, "/pause?mode=keep", None)
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.send, weights)
        finished = await asyncio.to_thread(sender.http.post, "/finish_weight_update")  # without a body
        assert finished.status_code == 200, finished.text
        await asyncio.to_thread(sender.post, "/resume", None)
        async for chunk in stream:
            versions += [span.policy_version for span in chunk.version_spans]
    assert sorted(set(versions)) == [before, before + 1]
    assert versions == sorted(versions)


async def test_what_the_model_lacks_is_refused_and_the_trainer_does_not_wait(shared_vllm: Any) -> None:
    engine = shared_vllm.engine
    before, old, weights = engine.policy_version, await greedy(engine), weights_of(81)
    async with listening(make_app(engine)) as url, sender_to(url, packed=True) as sender:
        for wrong, reason in (
            ([("oops", weights[0][1])], "no weight named 'oops'"),
            ([(weights[0][0], weights[1][1])], "must have shape"),
            ([weights[0], weights[0]], "came twice"),
        ):
            await asyncio.to_thread(sender.start)
            assert reason in message(await asyncio.to_thread(sender.send, wrong))
            assert reason in message(await asyncio.to_thread(sender.send, weights))  # the update has failed
            assert reason in message(await asyncio.to_thread(sender.finish))
        assert (engine.policy_version, await greedy(engine)) == (before, old)
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.send, weights[:-1])
        assert "1 of" in message(await asyncio.to_thread(sender.finish))
        await waits_for_whole_weights(engine)
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.send, weights)
        assert "must rise above" in message(await asyncio.to_thread(sender.finish, weight_version=str(before - 1)))
        await waits_for_whole_weights(engine)
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.send, weights)
        finished = await asyncio.to_thread(sender.finish, weight_version=str(before + 5))
        assert finished.json()["policy_version"] == engine.policy_version == before + 5
    assert await greedy(engine) != old


async def test_a_second_trainer_replaces_the_first_and_what_it_had_sent(shared_vllm: Any) -> None:
    engine = shared_vllm.engine
    old, first, second = await greedy(engine), weights_of(82), weights_of(83)
    async with listening(make_app(engine)) as url, sender_to(url, packed=True) as gone:
        await asyncio.to_thread(gone.start)
        await asyncio.to_thread(gone.send, first[:4])
        async with sender_to(url, packed=True) as sender:
            assert "POST /start_weight_update first" in message(await asyncio.to_thread(sender.send, second))
            await waits_for_whole_weights(engine)
        async with sender_to(url, packed=True) as sender:
            await asyncio.to_thread(sender.start)
            await asyncio.to_thread(sender.send, second)
            assert (await asyncio.to_thread(sender.finish)).status_code == 200
    new = await greedy(engine)
    await engine.update_weights(TensorSource(second), policy_version=engine.policy_version + 1)
    assert await greedy(engine) == new != old


async def test_i6_a_trainer_that_dies_in_mid_transfer_stops_the_engine_until_whole_weights_come(
    shared_vllm: Any,
) -> None:
    engine = shared_vllm.engine
    before, old, weights = engine.policy_version, await greedy(engine), weights_of(84)
    from support.packed_sender import describe

    async with listening(make_app(engine)) as url, sender_to(url) as sender:
        await asyncio.to_thread(sender.start)
        body = {"update_info": describe(weights)}
        receiving = asyncio.create_task(asyncio.to_thread(sender.http.post, "/update_weights", json=body))
        await asyncio.to_thread(sender.endpoint.broadcast, weights[0][1].detach(), src=0)
        sender.endpoint.close()
        async with asyncio.timeout(60):
            assert "the trainer is gone" in message(await receiving)
        assert "POST /init_weight_transfer_engine again" in message(await asyncio.to_thread(sender.finish))
    assert engine.policy_version == before
    await waits_for_whole_weights(engine)
    await engine.update_weights(TensorSource(weights_of(87)), policy_version=before + 1)
    new = await greedy(engine)
    await engine.update_weights(TensorSource(weights_of(87)), policy_version=before + 2)
    assert await greedy(engine) == new != old


async def test_a_trainer_that_never_comes_or_stops_sending_has_a_deadline(shared_vllm: Any) -> None:
    from support.packed_sender import describe

    engine = shared_vllm.engine
    before, old = engine.policy_version, await greedy(engine)
    async with listening(make_app(engine)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        late = await http.post("/init_weight_transfer_engine", json={"init_info": MEETING, "timeout_s": 1})
        assert "within 1 s" in message(late)
        async with sender_to(url, timeout_s=4.0) as sender:
            await asyncio.to_thread(sender.start)
            body = {"update_info": describe(weights_of(85))}
            assert "sent nothing in time" in message(await http.post("/update_weights", json=body))
            await waits_for_whole_weights(engine)
        async with sender_to(url, timeout_s=4.0) as sender:
            await asyncio.to_thread(sender.start)
            assert (await asyncio.to_thread(sender.send, weights_of(85))).status_code == 200
            await asyncio.sleep(6)
            assert "neither sent more nor finished for 4 s" in message(await asyncio.to_thread(sender.finish))
    await waits_for_whole_weights(engine)
    await engine.update_weights(TensorSource(weights_of(85)), policy_version=before + 1)
    assert await greedy(engine) != old


async def test_bad_fields_are_refused_by_name(shared_vllm: Any) -> None:
    async with asgi_client(make_app(shared_vllm.engine)) as http:
        for path, body, reason in (
            ("/init_weight_transfer_engine", {}, "init_info is required"),
            ("/init_weight_transfer_engine", {"init_info": {**MEETING, "master_port": 0}}, "init_info.master_port"),
            ("/init_weight_transfer_engine", {"init_info": {**MEETING, "world_size": 5, "rank_offset": 5}}, "got 5"),
            ("/init_weight_transfer_engine", {"init_info": {**MEETING, "packed": "yes"}}, "init_info.packed"),
            ("/update_weights", {"update_info": {**WEIGHT, "names": []}}, "one entry for each of the 0 names, got 1"),
            ("/update_weights", {"update_info": {**WEIGHT, "shapes": []}}, "one entry for each of the 1 names, got 0"),
            ("/update_weights", {"update_info": {**WEIGHT, "dtype_names": ["complex64"]}}, "must have a dtype among"),
            ("/update_weights", {"update_info": [WEIGHT]}, "update_info"),
            ("/finish_weight_update", {"weight_version": "seven"}, "weight_version"),
        ):
            assert reason in message(await http.post(path, json=body))


async def test_an_engine_in_the_servers_process_takes_the_same_transfers() -> None:
    weights = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(3))]
    engine = scripted_engine("never")
    async with listening(make_app(engine)) as url, sender_to(url, packed=True) as sender:
        await asyncio.to_thread(sender.start)
        assert (await asyncio.to_thread(sender.send, weights)).status_code == 200
        finished = (await asyncio.to_thread(sender.finish, weight_version="4")).json()
        assert (finished["policy_version"], engine.policy_version, engine.loaded_names) == (4, 4, ["a", "b"])
        state = (await asyncio.to_thread(sender.http.get, "/v1/weights")).json()
        assert state["digest"] == finished["digest"] is not None


async def test_fields_of_our_own_trainer_refuse_early_and_compare_digests(shared_vllm: Any) -> None:
    from support.packed_sender import describe

    engine = shared_vllm.engine
    before, old, weights = engine.policy_version, await greedy(engine), weights_of(93)
    async with listening(make_app(engine)) as url, sender_to(url, packed=True) as sender:
        for body, reason in (
            ({"policy_version": before}, "must rise above"),
            ({"update_info": describe(weights[1:])}, "1 of"),
            ({"update_info": describe([*weights, ("oops", weights[0][1])])}, "no weight named 'oops'"),
            ({"update_info": describe([(name, weight.int()) for name, weight in weights])}, "floating-point numbers"),
        ):
            assert reason in message(await asyncio.to_thread(sender.http.post, "/start_weight_update", json=body))
        assert (engine.policy_version, await greedy(engine)) == (before, old)
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.send, weights)
        assert "their digests differ" in message(await asyncio.to_thread(sender.finish, digest="other"))
        await waits_for_whole_weights(engine)
        begin = {"reuse_kv": True, "in_flight": "finish", "update_info": describe(weights)}
        await asyncio.to_thread(sender.post, "/start_weight_update", begin)
        await asyncio.to_thread(sender.send, weights)
        finished = await asyncio.to_thread(sender.finish)
        assert finished.status_code == 200, finished.text
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.send, weights)
        finished = await asyncio.to_thread(sender.finish, digest=finished.json()["digest"])
        assert finished.status_code == 200, finished.text
        await asyncio.to_thread(sender.start)
        await asyncio.to_thread(sender.post, "/shutdown_weight_transfer_engine", {})
        assert "init_weight_transfer_engine first" in message(await asyncio.to_thread(sender.finish))
    assert await greedy(engine) != old


async def test_the_configuration_is_in_vllms_form(shared_vllm: Any) -> None:
    async with asgi_client(make_app(shared_vllm.engine)) as http:
        info = (await http.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
        text = (await http.get("/server_info")).json()["vllm_config"]
        assert "config_format" in message(await http.get("/server_info", params={"config_format": "xml"}))
    assert info["weight_transfer_config"] == {"backend": "gloo"}
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["model_config"]["dtype"] == "torch.float32"
    assert (info["model_config"]["max_model_len"], info["parallel_config"]["world_size"]) == (256, 1)
    assert "processed_logprobs" in text


@pytest.mark.filterwarnings("ignore:Tensor .* has size:UserWarning")
@pytest.mark.parametrize("buffer_bytes", [1, 8, 30, 100, 10**6])
async def test_packed_weights_are_cut_as_vllm_cuts_them(buffer_bytes: int) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    generator = torch.Generator().manual_seed(buffer_bytes)
    tensors = {
        f"weight{number}": torch.rand(shape, generator=generator).to(dtype)
        for number, (shape, dtype) in enumerate(
            [
                ((3,), torch.float32),
                ((5,), torch.int8),
                ((2, 3), torch.bfloat16),
                ((), torch.float64),
                ((0,), torch.int64),
            ]
            * 3
        )
    }
    specs = [
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    sent = iter(list(tensors.items()))
    for chunk in BufferPacking(packed=True, buffer_bytes=buffer_bytes).split(specs):
        packed = pack_tensors(sent, lambda item: item[1], buffer_bytes)
        assert packed is not None
        assert packed.names == [spec.name for spec in chunk]
        for name, tensor in unpack(packed.packed_tensor, chunk):
            assert torch.equal(tensor, tensors.pop(name))
    assert not tensors
