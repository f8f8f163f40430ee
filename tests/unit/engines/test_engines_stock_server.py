"""Upstreams that are stock vLLM: what they are sent, how they are known, and what is refused."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.gateways import CALL, USER, ask, result, running_gateway, scripted
from support.servers import encode, listening, make_app, scripted_engine, server_tokenizer
from support.stock_server import StockServer
from support.waits import wait_until
from unbroken.engines.http import HttpEngine
from unbroken.errors import EchoError, EngineError, SamplingError
from unbroken.types import EncodedImage, ImageSpan, SampleChunk, SampleRequest, SamplingParams, StructuredOutput

VOCAB_SIZE = 64


def stock(**settings: Any) -> StockServer:
    engine = scripted_engine(lambda prompt_ids: [5, 6, 7], allow_forks=True)
    return StockServer(engine, **settings)


def request(request_id: str = "a", *, prompt_ids: Any = (1, 2, 3), **params: Any) -> SampleRequest:
    params = {"max_tokens": 5, **params}
    return SampleRequest(request_id=request_id, prompt_ids=np.array(prompt_ids), params=SamplingParams(**params))


async def connect(*urls: str, max_retries: int = 2) -> HttpEngine:
    return await HttpEngine.connect(urls, vocab_size=VOCAB_SIZE, max_retries=max_retries)


async def test_every_sampling_parameter_is_sent_and_the_conversation_in_the_header() -> None:
    server = stock(adapters=("pirate",))
    async with listening(server.make_app()) as url:
        engine = await connect(url)
        assert engine.adapters == ("pirate",)
        params = SamplingParams(
            max_tokens=9,
            temperature=0.7,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            seed=4,
            stop_token_ids=(7,),
            stop_strings=("x",),
            num_top_logprobs=2,
        )
        await engine.sample(
            SampleRequest(request_id="a", prompt_ids=[1, 2], params=params, adapter="pirate", session_id="s-1")
        )
        await engine.close()
    assert server.sessions[-1] == "s-1"
    body = server.bodies[-1]
    assert (body["token_ids"], body["model"], body["return_token_ids"]) == ([1, 2], "pirate", True)
    assert body["sampling_params"] == {
        "n": 1, "max_tokens": 9, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 4, "stop": ["x"], "stop_token_ids": [7],
        "ignore_eos": True, "include_stop_str_in_output": True, "detokenize": True, "logprobs": 3,
    }  # fmt: skip


async def test_a_bias_and_allowed_ids_are_sent_and_what_no_answer_would_tell_is_refused() -> None:
    server = stock()
    async with listening(server.make_app()) as url:
        engine = await connect(url)
        own: dict[str, Any] = {"logit_bias": ((5, -1.5),), "allowed_token_ids": (5, 6)}
        (sequence,) = (await engine.sample(request(**own))).sequences
        for name, value in (("min_tokens", 2), ("bad_words_ids", ((5, 6),))):
            with pytest.raises(SamplingError, match=rf"{name} must be left out with {url}, got .*unbroken serve"):
                await engine.sample(request(name, **{name: value}))
        await engine.close()
    assert sequence.controls == SamplingParams(**own).controls
    sent = server.bodies[-1]["sampling_params"]
    assert (sent["logit_bias"], sent["allowed_token_ids"]) == ({"5": -1.5}, [5, 6])


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("12", 12), ("step-3", 0)])
async def test_the_label_of_the_weights_is_the_version_where_it_is_a_number(label: str, version: int) -> None:
    async with listening(stock(version=label).make_app()) as url:
        engine = await connect(url)
        (sequence,) = (await engine.sample(request())).sequences
        chunks = [chunk async for chunk in engine.stream(request("b"))]
        await engine.close()
    assert sequence.policy_versions.tolist() == [version] * 3
    assert SampleChunk.join(chunks, params=SamplingParams()).policy_versions.tolist() == [version] * 3
    assert engine.policy_version == version


@pytest.mark.parametrize("cuts_tops", [True, False], ids=["0.32", "0.33"])
async def test_the_most_likely_ids_are_as_many_as_asked_for(cuts_tops: bool) -> None:
    async with listening(stock(cuts_tops=cuts_tops).make_app()) as url:
        engine = await connect(url)
        (sequence,) = (await engine.sample(request(num_top_logprobs=2))).sequences
        await engine.close()
    assert sequence.top_logprobs is not None
    assert sequence.top_logprobs.token_ids.tolist() == [[5, 0], [6, 0], [7, 0]]
    assert sequence.top_logprobs.logprobs.tolist() == [[-0.5, -1.0]] * 3


async def test_an_answer_of_503_is_asked_again() -> None:
    server = stock()
    async with listening(server.make_app()) as url:
        engine = await connect(url)
        server.num_refusals = 2
        assert (await engine.sample(request())).sequences[0].completion_ids.tolist() == [5, 6, 7]
        server.num_refusals = 2
        assert [chunk async for chunk in engine.stream(request("b"))]
        await engine.close()


async def test_a_cancelled_request_is_disconnected_and_ends_there() -> None:
    server = stock()
    async with listening(server.make_app()) as url:
        engine = await connect(url)
        long = scripted_engine(lambda prompt_ids: [5] * 4000, allow_forks=True)
        server.engine = long
        task = asyncio.create_task(engine.sample(request(max_tokens=4000)))
        await wait_until(lambda: server.num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(engine.stream(request("b", max_tokens=4000))) as chunks:
            await anext(chunks)
        await wait_until(lambda: not server.num_running)
        assert long.num_sampled < 8000
        await engine.close()


async def test_sessions_stay_with_their_server_and_go_on_elsewhere_without_it() -> None:
    stays, leaves = stock(), stock()
    async with listening(stays.make_app()) as one:
        async with listening(leaves.make_app()) as other:
            engine = await connect(one, other, max_retries=0)
            for k in range(20):  # all of them go to one server once in half a million times
                for turn in range(2):
                    await engine.sample(request(f"{k}/{turn}", prompt_ids=[k + 1, 2]))
            seen = [{tuple(body["token_ids"]) for body in each.bodies[2:]} for each in (stays, leaves)]
            assert all(seen)
            assert sum(map(len, seen)) == 20
        for k in range(20):
            assert (await engine.sample(request(f"{k}/2"))).sequences[0].completion_ids.tolist() == [5, 6, 7]
        await engine.close()


async def test_logprobs_before_the_temperature_are_taken_only_where_they_are_the_sampled_ones() -> None:
    async with listening(stock(applies_sampling=False).make_app()) as url:
        engine = await connect(url)
        for temperature in (0.0, 1.0):
            await engine.sample(request(temperature=temperature))
        refused: list[tuple[dict[str, Any], str]] = [
            ({"temperature": 0.7}, "temperature must be 0 or 1, got 0.7"),
            ({"top_p": 0.9}, "sampling.top_p must be 1.0, got 0.9"),
            ({"structured_output": StructuredOutput(regex="a")}, "sampling.structured_output must be None"),
        ]
        for params, message in refused:
            with pytest.raises(SamplingError, match=message) as caught:
                await engine.sample(request(**params))
            assert "--logprobs-mode processed_logprobs" in str(caught.value)
        await engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"enabled": False}, "--enable-scale-out"), ({"shift": 3.0}, "gives logits, not logprobs")],
)
async def test_a_server_that_cannot_be_used_is_an_error_with_what_to_do(settings: Any, message: str) -> None:
    async with listening(stock(**settings).make_app()) as url:
        with pytest.raises(EngineError, match=message) as caught:
            await connect(url)
        assert url in str(caught.value)


async def test_the_size_of_the_vocabulary_must_be_known() -> None:
    async with listening(stock().make_app()) as url:
        with pytest.raises(EngineError, match="does not report its vocab_size"):
            await HttpEngine.connect([url])


async def test_another_prompt_and_lost_logprobs_are_errors() -> None:
    server = stock()
    async with listening(server.make_app()) as url:
        engine = await connect(url)
        server.echo = [9, 9]
        asked = request()
        with pytest.raises(EchoError):
            (await engine.sample(asked)).check_answers(asked)
        with pytest.raises(EchoError):
            [chunk async for chunk in engine.stream(request("b"))]
        server.echo, server.shift = None, -9999.0
        with pytest.raises(EngineError, match="without a finite logprob"):
            await engine.sample(request("c"))
        await engine.close()


async def test_images_are_refused() -> None:
    span = ImageSpan(offset=1, length=1, image=EncodedImage(b"x"), placeholder_id=2, settings="{}")
    async with listening(stock().make_app()) as url:
        engine = await connect(url)
        with pytest.raises(SamplingError, match="takes no images"):
            await engine.sample(SampleRequest(request_id="a", prompt_ids=[1, 2], images=(span,)))
        await engine.close()


async def test_ours_and_stock_of_one_model_serve_together() -> None:
    ours = scripted_engine(lambda prompt_ids: [5, 6, 7], allow_forks=True)
    stand_in = stock(name="tiny")
    async with listening(make_app(ours)) as one, listening(stand_in.make_app()) as other:
        engine = await HttpEngine.connect([one, other], vocab_size=len(server_tokenizer()))
        for k in range(8):
            await engine.sample(request(f"{k}/0"))
        await engine.close()
    assert len(ours.requests) + len(stand_in.bodies) - 2 == 8
    assert ours.requests


async def test_a_session_over_a_stock_server_is_one_exact_row(tmp_path: Path) -> None:
    server = StockServer(scripted("Let me look.\n" + CALL, "Let me look.\n" + CALL, CALL, "It is 17.<|im_end|>"))
    async with listening(server.make_app()) as url:
        engine = await HttpEngine.connect([url], vocab_size=len(server_tokenizer()))  # samples twice
        async with running_gateway(engine, tmp_path) as gateway:
            created = await gateway.create()
            agent = gateway.agent(created)
            first = await ask(agent, [USER])
            second = await ask(agent, [USER, first, result(first)], stream=False)
            (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
        await engine.close()
    assert second["content"] == "It is 17."
    assert row["token_ids"] == [*server.bodies[-1]["token_ids"], *encode("It is 17.<|im_end|>")]
    assert server.sessions[-1] == created["session_id"]
