"""Kept ids on the wire: in the native and the token dialect, whole and streamed, and from a stock vLLM server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.models import tiny_qwen3
from support.servers import asgi_client, listening, make_app, scripted_engine
from support.stock_server import StockServer
from unbroken.engines.http import HttpEngine
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, SamplingError
from unbroken.types import KeptIds, SampleChunk, SampleRequest, SampleResult, SamplingParams, token_ids

PROMPT_IDS = token_ids([1, 2, 3, 4])
SETS = [[5, 8], [], [6, 7, 9]]
PARAMS = SamplingParams(max_tokens=9, top_p=0.9, return_kept_ids=True)


def engine() -> ScriptedEngine:
    return scripted_engine(lambda _: ScriptedReply(completion_ids=[5, 6, 7], kept_ids=KeptIds.of(SETS)))


def ask(request_id: str = "a", **params: Any) -> SampleRequest:
    return SampleRequest(request_id=request_id, prompt_ids=PROMPT_IDS, params=replace(PARAMS, **params), n=2)


async def sample_both_ways(engine: Any, request: SampleRequest) -> tuple[SampleResult, list[Any]]:
    """The answer, and the same request as a stream, joined."""
    result = await engine.sample(request)
    chunks = [chunk async for chunk in engine.stream(replace(request, request_id=f"{request.request_id}2"))]
    temperature = request.params.temperature or 1.0
    parts = [[chunk for chunk in chunks if chunk.index == k] for k in range(request.n)]
    return result, [SampleChunk.join(part, params=SamplingParams(temperature=temperature)) for part in parts]


async def test_a_client_gets_what_the_servers_engine_kept():
    async with listening(make_app(engine())) as url:
        http = await HttpEngine.connect([url])
        result, streamed = await sample_both_ways(http, ask())
        uncut = [await http.sample(ask("c", **each)) for each in ({"return_kept_ids": False}, {"top_p": 1.0})]
        await http.close()
    for sequence in (*result.sequences, *streamed):
        assert sequence.kept_ids.to_lists() == SETS
        assert sequence.kept_ids.token_ids.dtype == np.int32
        assert sequence.kept_ids.offsets.dtype == np.int64
    assert all(sequence.kept_ids is None for each in uncut for sequence in each.sequences)


async def test_what_changes_logits_reaches_the_servers_engine_and_stands_in_the_answer():
    scripted = engine()
    own = {
        "logit_bias": ((5, -1.5), (6, 2)), "allowed_token_ids": (5, 6, 7), "min_tokens": 2, "stop_token_ids": (7,),
        "bad_words_ids": ((8,), (6, 5)), "frequency_penalty": 0.3,
    }  # fmt: skip
    async with listening(make_app(scripted)) as url:
        http = await HttpEngine.connect([url])
        result = await http.sample(ask(**own))
        await http.close()
    (request,) = scripted.requests
    assert request.params == ask(**own).params
    assert [sequence.controls for sequence in result.sequences] == [ask(**own).params.controls] * 2


async def test_an_engine_that_does_not_say_them_is_refused_through_the_server():
    async with listening(make_app(scripted_engine(lambda _: [5]))) as url:
        http = await HttpEngine.connect([url], max_retries=0)
        with pytest.raises(SamplingError, match=r"return_kept_ids with top_p 0\.9 needs replies that have them"):
            await http.sample(ask())
        await http.close()


async def test_the_token_dialect_has_them_as_vllm_writes_them_and_only_if_asked():
    sampling = {"max_tokens": 9, "top_p": 0.9, "return_kept_ids": True}
    body = {"token_ids": PROMPT_IDS.tolist(), "sampling_params": sampling}
    async with asgi_client(make_app(engine())) as client:
        (choice,) = (await client.post("/inference/v1/generate", json=body)).json()["choices"]
        del sampling["return_kept_ids"]
        (without,) = (await client.post("/inference/v1/generate", json=body)).json()["choices"]
    assert choice["sampling_mask"] == SETS
    assert "sampling_mask" not in without


@pytest.mark.parametrize("cuts_tops", [True, False])
async def test_the_most_likely_ids_of_a_stock_server_say_what_it_kept(cuts_tops):
    model = tiny_qwen3()
    ours = TransformersEngine(model)
    request = ask(top_k=7, top_p=0.8, seed=5, temperature=0.7)
    expected = await ours.sample(request)
    async with listening(StockServer(ours, cuts_tops=cuts_tops, gives_tops=True).make_app()) as url:
        http = await HttpEngine.connect([url], vocab_size=64)
        result, streamed = await sample_both_ways(http, request)
        with pytest.raises(SamplingError, match=r"return_kept_ids with top_p 0\.9 needs top_k too on http"):
            await http.sample(ask("p"))
        await http.close()
    await ours.close()
    for found in (result.sequences, streamed):
        for sequence, wanted in zip(found, expected.sequences, strict=True):
            assert sequence.completion_ids.tolist() == wanted.completion_ids.tolist()
            assert sequence.kept_ids.to_lists() == wanted.kept_ids.to_lists()


async def test_a_stock_server_with_raw_logprobs_is_refused_as_before():
    async with listening(StockServer(engine(), applies_sampling=False).make_app()) as url:
        http = await HttpEngine.connect([url], vocab_size=64)
        with pytest.raises(SamplingError, match=r"sampling\.top_k must be 0, got 7.*-mode processed_logprobs"):
            await http.sample(ask(top_k=7))
        await http.close()


async def test_a_server_that_ignores_the_request_is_found_out():
    class Silent(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> SampleResult:
            return await super().sample(replace(request, params=replace(request.params, return_kept_ids=False)))

    silent = Silent([[5], [5]])
    with pytest.raises(EngineError, match=r"the engine does not say which ids it sampled from: sampling\.top_p 0\.9"):
        (await silent.sample(ask())).check_answers(ask())
