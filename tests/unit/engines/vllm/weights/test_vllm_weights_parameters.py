"""Weights that come parameter by parameter, as TRL's client sends them: one version when they are whole."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.servers import asgi_client, listening, make_app, scripted_engine
from support.vllm_session import greedy
from unbroken.errors import IncompleteWeightsError
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")


def sender_to(url: str) -> Any:
    from support.parameter_sender import ParameterSender

    return ParameterSender(url)


async def test_i6_parameters_are_one_version_when_the_prefix_cache_is_reset(shared_vllm: Any) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    before, old = engine.policy_version, await greedy(engine)
    weights = list(tiny_vllm_model(51).named_parameters())
    async with listening(make_app(engine)) as url:
        sender = await asyncio.to_thread(sender_to, url)
        await asyncio.to_thread(sender.send, weights[:-1])
        response = await asyncio.to_thread(sender.http.post, "/reset_prefix_cache/")
        assert response.status_code == 400
        assert "1 of" in response.json()["error"]["message"]
        assert engine.policy_version == before
        with pytest.raises(IncompleteWeightsError):
            await greedy(engine)
        await asyncio.to_thread(sender.post, "/close_communicator/")
        sender.close()
        sender = await asyncio.to_thread(sender_to, url)
        await asyncio.to_thread(sender.send, weights)
        answer = await asyncio.to_thread(sender.post, "/reset_prefix_cache/")
        assert (answer["loaded"], answer["policy_version"]) == (True, before + 1)
        new = await greedy(engine)
        assert (await asyncio.to_thread(sender.post, "/reset_prefix_cache/"))["loaded"] is False
        await asyncio.to_thread(sender.post, "/close_communicator/")
        sender.close()
    assert engine.policy_version == before + 1
    assert new != old
    await engine.update_weights(TensorSource(weights), policy_version=before + 2)
    assert await greedy(engine) == new


async def test_i6_a_sender_who_goes_away_half_way_stops_the_engine_until_whole_weights_come(
    shared_vllm: Any,
) -> None:
    from support.vllm_engines import tiny_vllm_model

    engine = shared_vllm.engine
    old = await greedy(engine)
    weights = list(tiny_vllm_model(52).named_parameters())
    async with listening(make_app(engine)) as url:
        sender = await asyncio.to_thread(sender_to, url)
        await asyncio.to_thread(sender.send, weights[:4])
        again = await asyncio.to_thread(sender_to, url)
        with pytest.raises(IncompleteWeightsError):
            await greedy(engine)
        await asyncio.to_thread(again.send, weights)
        assert (await asyncio.to_thread(again.post, "/reset_prefix_cache/"))["loaded"] is True
        await asyncio.to_thread(again.post, "/close_communicator/")
        assert (await asyncio.to_thread(again.post, "/reset_prefix_cache/"))["loaded"] is False
        sender.close()
        again.close()
    assert await greedy(engine) != old


async def test_parameters_that_cannot_be_taken_are_refused_before_they_are_sent(shared_vllm: Any) -> None:
    engine = shared_vllm.engine
    async with listening(make_app(engine)) as url, httpx.AsyncClient(base_url=url) as http:
        shape = [64, 32]
        parameter = {"name": "model.embed_tokens.weight", "dtype": "torch.float32", "shape": shape}
        refused = await http.post("/update_named_param/", json=parameter)
        assert "POST /init_communicator/ first" in refused.json()["error"]["message"]
        meeting = {"host": "127.0.0.1", "port": 9, "world_size": 2}
        for body, reason in (
            (meeting, "the communicator needs GPUs (NCCL), and this server's engine is on cpu"),
            ({**meeting, "transport": "gloo", "world_size": 5}, "world_size must be 2"),
        ):
            refused = await http.post("/init_communicator/", json=body)
            assert refused.status_code == 400
            assert reason in refused.json()["error"]["message"]
        sender = await asyncio.to_thread(sender_to, url)
        for change, reason in (({"name": "oops"}, "no weight named 'oops'"), ({"shape": [1]}, "must have shape")):
            refused = await http.post("/update_named_param/", json={**parameter, **change})
            assert refused.status_code == 400
            assert reason in refused.json()["error"]["message"]
        await asyncio.to_thread(sender.post, "/close_communicator/")
        sender.close()
    await engine.check_health()


async def test_an_engine_without_workers_of_its_own_says_that_it_takes_no_parameters() -> None:
    async with asgi_client(make_app(scripted_engine("never"))) as http:
        meeting = {"host": "127.0.0.1", "port": 9, "world_size": 2, "transport": "gloo"}
        refused = await http.post("/init_communicator/", json=meeting)
        assert refused.status_code == 400
        assert "serve with --engine vllm" in refused.json()["error"]["message"]
