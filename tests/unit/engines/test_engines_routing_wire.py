"""Experts on the wire: in the native and the token dialect, whole and streamed, and from a stock vLLM server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.servers import asgi_client, listening, make_app, scripted_engine
from support.stock_server import StockServer
from unbroken.engines.http import HttpEngine
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import EngineError, InvariantError, SamplingError
from unbroken.types import (
    SampleChunk,
    SampleRequest,
    SamplingParams,
    TokenIds,
    read_experts,
    routed_experts,
    token_ids,
    write_experts,
)

NUM_LAYERS, TOP_K = 3, 2
PROMPT_IDS = token_ids([1, 2, 3, 4])


def make_experts(num_ids: int, dtype: Any) -> np.ndarray:
    return np.arange(num_ids * NUM_LAYERS * TOP_K).reshape(num_ids, NUM_LAYERS, TOP_K).astype(dtype)


def engine(dtype: Any = np.uint8) -> ScriptedEngine:
    def reply(prompt_ids: TokenIds) -> ScriptedReply:
        return ScriptedReply(completion_ids=[5, 6, 7], routed_experts=make_experts(len(prompt_ids) + 2, dtype))

    return scripted_engine(reply)


def ask(request_id: str = "a", **params: Any) -> SampleRequest:
    params = {"return_routed_experts": True, "max_tokens": 9, **params}
    return SampleRequest(request_id=request_id, prompt_ids=PROMPT_IDS, params=SamplingParams(**params), n=2)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
async def test_a_client_gets_the_experts_of_the_servers_engine(dtype):
    async with listening(make_app(engine(dtype))) as url:
        http = await HttpEngine.connect([url])
        result = await http.sample(ask())
        chunks = [chunk async for chunk in http.stream(ask("b"))]
        none = await http.sample(ask("c", return_routed_experts=False))
        await http.close()
    streamed = [SampleChunk.join([c for c in chunks if c.index == k], params=SamplingParams()) for k in range(2)]
    for sequence in (*result.sequences, *streamed):
        assert sequence.routed_experts.dtype == dtype
        np.testing.assert_array_equal(sequence.routed_experts, make_experts(6, dtype))
    assert all(sequence.routed_experts is None for sequence in none.sequences)


async def test_experts_are_cut_where_the_completion_is():
    result = await engine().sample(ask(max_tokens=2))
    np.testing.assert_array_equal(result.sequences[0].routed_experts, make_experts(5, np.uint8))


async def test_an_engine_without_experts_says_so_through_the_server():
    async with listening(make_app(scripted_engine(lambda prompt_ids: [5]))) as url:
        http = await HttpEngine.connect([url], max_retries=0)
        with pytest.raises(SamplingError, match="return_routed_experts needs an engine that records them"):
            await http.sample(ask())
        await http.close()


async def test_the_token_dialect_has_them_as_vllm_writes_them():
    body = {"token_ids": PROMPT_IDS.tolist(), "sampling_params": {"max_tokens": 9, "return_routed_experts": True}}
    async with asgi_client(make_app(engine())) as client:
        (choice,) = (await client.post("/inference/v1/generate", json=body)).json()["choices"]
        del body["sampling_params"]["return_routed_experts"]
        (without,) = (await client.post("/inference/v1/generate", json=body)).json()["choices"]
    np.testing.assert_array_equal(read_experts(choice["routed_experts"]), make_experts(6, np.uint8))
    assert without["routed_experts"] is None


async def test_a_stock_server_that_records_them_gives_them_and_another_is_refused():
    async with listening(StockServer(engine(), records_routing=True).make_app()) as url:
        http = await HttpEngine.connect([url], vocab_size=64)
        result = await http.sample(ask(max_tokens=9))
        chunks = [chunk async for chunk in http.stream(ask("b"))]
        await http.close()
    for sequence in (*result.sequences, SampleChunk.join([c for c in chunks if c.index == 0], params=SamplingParams())):
        np.testing.assert_array_equal(sequence.routed_experts, make_experts(6, np.uint8))
    async with listening(StockServer(engine()).make_app()) as url:
        http = await HttpEngine.connect([url], vocab_size=64)
        with pytest.raises(EngineError, match="start vLLM with --enable-return-routed-experts"):
            await http.sample(ask())
        await http.close()


def test_what_is_written_is_read_and_anything_else_refused():
    experts = routed_experts(make_experts(4, np.uint16))
    found = read_experts(write_experts(experts))
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, experts)
    assert write_experts(None) is None
    assert read_experts(None) is None
    for text in ("", "!", "AAAA", write_experts(np.zeros((2, 2, 2), np.float32))):
        with pytest.raises(InvariantError, match="routed_experts must be"):
            read_experts(text)
