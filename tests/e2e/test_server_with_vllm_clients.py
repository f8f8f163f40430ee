"""Clients written for vLLM's own server, unmodified, against ours: TRL's since 1.16, that of `renderers`; its types."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from support.forks import run_python
from support.servers import MODEL, asgi_client, encode, listening, make_app, scripted_engine, server_tokenizer

REPLY = "hello<|im_end|>"


@pytest.fixture(scope="module")
def trl() -> dict[str, Any]:
    script = Path(__file__).parent / "clients" / "trl_openai_client.py"

    async def run() -> CompletedProcess[str]:
        async with listening(make_app(scripted_engine(REPLY))) as url:
            return await asyncio.to_thread(run_python, script, url, timeout=240)

    done = asyncio.run(run())
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_trls_client_finds_the_model_and_generates_from_texts_and_ids(trl: dict[str, Any]) -> None:
    reply = encode(REPLY)[:6]
    assert (trl["model"], trl["world_size"]) == (MODEL, 1)
    assert trl["texts"]["prompt_ids"] == [encode("hello"), encode("you")]
    assert trl["ids"]["prompt_ids"] == [[5, 6, 7], [8], [9, 10]]
    assert trl["ids"]["completion_ids"] == [reply] * 6
    assert trl["ids"]["logprob_token_ids"] == [[[token_id] for token_id in reply]] * 6
    assert trl["ids"]["logprobs"] == [[[-0.5]] * len(reply)] * 6
    assert trl["three"]["logprob_token_ids"] == trl["ids"]["logprob_token_ids"][::2]  # the others: impossible
    assert trl["none"]["logprobs"] is None


def test_trls_client_chats_in_our_rendering(trl: dict[str, Any]) -> None:
    def rendered(**options: Any) -> list[int]:
        ids: list[int] = server_tokenizer().apply_chat_template(
            [{"role": "user", "content": "hi"}], add_generation_prompt=True, **options
        )["input_ids"]
        return ids

    assert trl["chat"]["prompt_ids"] == [rendered()] * 2
    assert trl["thinking"]["prompt_ids"] == [rendered(enable_thinking=False)]
    assert trl["chat"]["completion_ids"] == [encode(REPLY)[:6]] * 2


def test_trls_client_scores_sequences(trl: dict[str, Any]) -> None:
    assert trl["scores"]["actual_logprobs"] == [[[-0.5], [-0.5]], [[-0.5]]]
    assert trl["scores"]["actual_token_ids"] == [[[7], [8]], [[10]]]
    assert [position[0] for row in trl["scores"]["logprob_token_ids"] for position in row] == [7, 8, 10]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("regex", "Request failed: 400, "),
        ("images", "features.mm_placeholders"),
        ("image message", "must not hold an image"),
        ("key", "logit_bias="),
        ("template", "chat_template="),
    ],
)
def test_what_we_do_not_serve_is_refused_by_name(trl: dict[str, Any], case: str, expected: str) -> None:
    assert expected in trl["refused"][case]


@pytest.mark.parametrize("output_mode", ["tokens", "text"])
async def test_our_answers_are_vllms_types(output_mode: str) -> None:
    from pydantic import TypeAdapter
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse, GenerateStreamResponse

    body = {
        "token_ids": [5, 6], "output_mode": output_mode, "sampling_params": {"logprobs": 1, "n": 2, "max_tokens": 4},
        "return_token_ids": True,
    }  # fmt: skip
    async with asgi_client(make_app(scripted_engine(REPLY))) as client:
        whole = await client.post("/inference/v1/generate", json=body)
        streamed = await client.post("/inference/v1/generate", json={**body, "stream": True})
    read = TypeAdapter(GenerateResponse).validate_json(whole.content)
    assert [choice.token_ids for choice in read.choices] == [encode(REPLY)[:4]] * 2
    assert read.choices[0].weight_versions[0].end == 4
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    chunks = [TypeAdapter(GenerateStreamResponse).validate_json(line) for line in lines[:-1]]
    ids = [token_id for chunk in chunks for one in chunk.choices if one.index == 1 for token_id in one.token_ids]
    assert ids == encode(REPLY)[:4]
    assert chunks[0].prompt_token_ids == [5, 6]


async def test_the_client_of_the_renderers_package_generates() -> None:
    from renderers.client import generate

    renderer = _IdsOnly()
    app = make_app(scripted_engine(REPLY))
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=asgi_client(app))
    sampling = {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "seed": 3}
    answer = await generate(
        client=client,
        renderer=renderer,
        messages=[],
        model=MODEL,
        prompt_ids=[5, 6, 7],
        sampling_params=sampling,
        cache_salt="7",
        priority=0,
    )
    assert answer["prompt_ids"] == [5, 6, 7]
    assert answer["completion_ids"] == encode(REPLY)
    assert answer["completion_logprobs"] == [-0.5] * len(encode(REPLY))
    assert answer["finish_reason"] == "stop"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        await generate(
            client=client, renderer=renderer, messages=[], model=MODEL, prompt_ids=[5] * 4096, sampling_params=sampling
        )


class _IdsOnly:
    """The methods of a renderer that this client calls if it has the prompt's ids."""

    def get_stop_token_ids(self) -> list[int]:
        return encode("<|im_end|>")

    def parse_response(self, completion_ids: list[int], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(content="", reasoning_content=None, tool_calls=[], reasoning_complete=True)


async def test_health_has_no_address_that_trls_client_would_follow() -> None:
    async with asgi_client(make_app(scripted_engine(REPLY))) as client:
        answer: httpx.Response = await client.get("/health", headers={"X-Forwarded-For": "10.0.0.9"})
    assert "x-forwarded-for" not in answer.headers
