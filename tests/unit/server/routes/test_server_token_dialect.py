"""vLLM's token dialect: ids in, ids out, whole and streamed, and what it owes to exactness."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from support.servers import MODEL, asgi_client, encode, make_app, scripted_engine
from unbroken.engines.scripted import ScriptedReply
from unbroken.types import FinishReason, token_ids

PATH = "/inference/v1/generate"
REPLY = "some é😀 text<|im_end|>"
END = encode("<|im_end|>")[0]


def asked(**fields: Any) -> dict[str, Any]:
    sampling = fields.pop("sampling_params", {})
    return {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 50, **sampling}, **fields}


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=asked(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    lines = (await client.post(PATH, json=asked(stream=True, **fields))).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


async def test_a_whole_answer_has_ids_logprobs_and_versions() -> None:
    async with asgi_client(make_app(scripted_engine(REPLY))) as client:
        answer = await post(client, request_id="mine", model=MODEL, sampling_params={"n": 2, "logprobs": 2})
    ids = encode(REPLY)
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("mine", MODEL, "tokens")
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["usage"]["completion_tokens"] == 2 * len(ids)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["token_ids"] == ids
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(ids)}]
        assert "text" not in choice
        own = [{"token": f"token_id:{one}", "token_id": one, "logprob": -0.5, "rank": 1} for one in ids]
        assert choice["logprobs"]["content"] == [{**one, "top_logprobs": [one]} for one in own]  # others: impossible


async def test_without_max_tokens_all_that_fits_is_sampled() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 500, context_length=40)
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(PATH, json={"token_ids": [1] * 10, "sampling_params": {}})
    (choice,) = answer.json()["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (30, "length")


@pytest.mark.parametrize("output_mode", ["tokens", "text"])
async def test_a_stream_joins_to_the_whole_answer(output_mode: str) -> None:
    fields = {"output_mode": output_mode, "sampling_params": {"n": 2, "logprobs": 0}}
    async with asgi_client(make_app(scripted_engine(REPLY))) as client:
        whole = await post(client, **fields)
        streamed = await events(client, stream_options={"include_usage": True}, **fields)
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == whole["usage"]
    assert [event["prompt_token_ids"] for event in streamed if "prompt_token_ids" in event] == [[5, 6, 7]]
    for choice in whole["choices"]:
        parts = [part for event in streamed for part in event["choices"] if part["index"] == choice["index"]]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
        assert [one for part in parts for one in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert "".join(part.get("text", "") for part in parts) == choice.get("text", "")
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({}, "some é😀 text"),
        ({"skip_special_tokens": False}, "some é😀 text<|im_end|>"),
        ({"stop": "😀 t"}, "some é"),
        ({"stop": ["no such", "é"]}, "some "),
        ({"stop": "é", "include_stop_str_in_output": True}, "some é😀 text"),
        ({"stop": "texts"}, "some é😀 text"),
    ],
)
async def test_texts_end_before_their_stop_string_and_ids_do_not(
    stream: bool, sampling: dict[str, Any], text: str
) -> None:
    reply = ScriptedReply(completion_ids=token_ids(encode(REPLY)), finish_reason=FinishReason.STOP)
    async with asgi_client(make_app(scripted_engine(lambda prompt_ids: reply))) as client:
        fields = {"output_mode": "text", "sampling_params": sampling}
        if stream:
            choices = [choice for event in await events(client, **fields) for choice in event["choices"]]
        else:
            choices = (await post(client, **fields))["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == encode(REPLY)


async def test_the_stop_id_that_the_request_named_is_told() -> None:
    async with asgi_client(make_app(scripted_engine(lambda prompt_ids: [9, 8, 7]))) as client:
        (choice,) = (await post(client, sampling_params={"stop_token_ids": [8]}))["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([9, 8], "stop", 8)


@pytest.mark.parametrize(("ignores", "length"), [(False, 2), (True, 3)])
async def test_the_ends_of_turns_stop_unless_they_are_ignored(ignores: bool, length: int) -> None:
    async with asgi_client(make_app(scripted_engine(lambda prompt_ids: [9, END, 7]))) as client:
        (choice,) = (await post(client, sampling_params={"ignore_eos": ignores}))["choices"]
    assert len(choice["token_ids"]) == length


WITHOUT_EFFECT = {"output_kind": 2, "routed_experts_prompt_start": 327}
"""As TRL 1.16 and verifiers 0.4 send them; no routed experts are in an answer."""


async def test_vllms_own_names_reach_the_engine() -> None:
    engine = scripted_engine(REPLY)
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 4, "stop": "x", "stop_token_ids": [3], "max_tokens": 9, "logprobs": 7,
    }  # fmt: skip
    async with asgi_client(make_app(engine)) as client:
        await post(client, sampling_params={**sampling, **WITHOUT_EFFECT}, cache_salt="any", request_id="mine")
    (request,) = engine.requests
    params = request.params
    assert request.prompt_ids.tolist() == [5, 6, 7]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (params.seed, params.stop_strings, params.max_tokens, params.num_top_logprobs) == (4, ("x",), 9, 7)
    assert {3, END} <= set(params.stop_token_ids)


async def test_ranks_are_those_among_the_most_likely_ids() -> None:
    from unbroken.server.wire.openai import format_token_logprobs
    from unbroken.types import SampledSequence, TopLogprobs, VersionSpan

    sampled = SampledSequence(
        completion_ids=token_ids([4, 9]),
        rollout_logprobs=np.array([-1.0, -7.0]),
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan(start=0, stop=2, policy_version=0),),
        top_logprobs=TopLogprobs(token_ids=np.array([[3, 4], [1, 2]]), logprobs=np.array([[-0.5, -1], [-1, -2]])),
    )
    second, outside = format_token_logprobs(sampled)["content"]
    assert [(one["token_id"], one["rank"]) for one in second["top_logprobs"]] == [(4, 2), (3, 1)]
    assert (outside["token_id"], outside["rank"], outside["logprob"]) == (9, None, -7.0)
    assert [(one["token_id"], one["rank"]) for one in outside["top_logprobs"]] == [(9, None), (1, 1), (2, 2)]
