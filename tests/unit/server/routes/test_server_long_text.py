"""Long text: refused by its length before it is encoded, and never in the way of other requests."""

import asyncio
import threading
import time

import httpx
import pytest

from support.servers import MODEL, asgi_client, encode, listening, make_app, scripted_engine, server_tokenizer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.types import TokenIds

CONTEXT = 2048
LONGEST = TextCodec(server_tokenizer()).longest_token
USER = [{"role": "user", "content": "hi"}]


class RecordingCodec(TextCodec):
    """Records the texts that it encodes."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.texts: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        self.texts.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def body_for(path: str, text: str) -> dict:
    """A request whose only long text is `text`."""
    spoken = [{"role": "user", "content": text}]
    return {
        "/v1/sample": {"prompts": ["a", text]},
        "/v1/completions": {"model": MODEL, "prompt": text},
        "/generate": {"prompts": ["a", text]},
        "/tokenize": {"prompt": text},
        "/tokenize messages": {"messages": spoken},
        "/v1/chat/completions": {"messages": spoken},
        "/v1/chat/completions tools": {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "f", "description": text}}],
        },
        "/v1/chat/completions/render": {"messages": [*USER, {"role": "assistant", "content": text}, *USER]},
        "/chat": {"messages": [USER, spoken]},
    }[path]


FIELDS = {
    "/v1/sample": "prompts[1]",
    "/v1/completions": "prompt",
    "/generate": "prompts[1]",
    "/tokenize": "prompt",
    "/tokenize messages": "messages",
    "/v1/chat/completions": "messages",
    "/v1/chat/completions tools": "messages",
    "/v1/chat/completions/render": "messages",
    "/chat": "messages[1]",
}


@pytest.mark.parametrize("path", FIELDS)
async def test_text_that_no_context_can_hold_is_refused_at_once(path: str) -> None:
    app = make_app(scripted_engine("hi", context_length=CONTEXT))
    async with asgi_client(app) as client:
        start = time.process_time()
        answer = await client.post(path.split()[0], json=body_for(path, "some words " * 400_000))
        assert time.process_time() - start < 2.0
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (FIELDS[path], "context_length_exceeded")
    assert error["message"].startswith(f"{FIELDS[path]} must have at most {CONTEXT * LONGEST} characters")
    assert "got 44" in error["message"]  # 4.4 million


async def test_the_longest_text_that_fits_is_taken() -> None:
    longest = "<|endoftext|>"  # the longest token that may follow itself
    app = make_app(scripted_engine("hi", context_length=64))
    async with asgi_client(app) as client:
        fits = await client.post("/v1/sample", json={"prompts": [longest * 63], "params": {"max_tokens": 1}})
        assert fits.status_code == 200, fits.text
        assert len(fits.json()["results"][0]["prompt_ids"]) == 63
        for number in (64, 65):
            answer = await client.post("/v1/sample", json={"prompts": [longest * number], "params": {"max_tokens": 1}})
            assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_twenty_megabytes_of_spaces_that_the_context_could_hold_are_a_400() -> None:
    app = make_app(scripted_engine("hi", context_length=2**21))
    async with asgi_client(app) as client:
        for path in ("/tokenize", "/v1/chat/completions"):
            answer = await client.post(path, json=body_for(path, " " * 20_000_000))
            assert answer.status_code == 400, answer.text
            assert "20000" in answer.json()["error"]["message"]


async def test_no_prompt_after_one_that_is_too_long_is_encoded() -> None:
    app = make_app(scripted_engine("hi", context_length=CONTEXT))
    codec = app.state.context.codec = RecordingCodec(server_tokenizer())
    async with asgi_client(app) as client:
        answer = await client.post("/v1/sample", json={"prompts": ["fine", "x y z " * 2000, *["x y z " * 2000] * 500]})
    assert answer.json()["error"]["message"].startswith("prompts[1]: This model's maximum context length is 2048")
    assert len(codec.texts) < 10


async def test_a_long_text_does_not_hold_up_the_loop_or_other_texts() -> None:
    app = make_app(scripted_engine("hi", context_length=2**20))
    async with asgi_client(app) as client:
        long = asyncio.create_task(client.post("/tokenize", json={"prompt": "many words here " * 10_000}))
        num_short = 0
        while not long.done():
            short = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
            assert short.status_code == 200
            num_short += 1
        assert (await long).json()["count"] == len(encode("many words here " * 10_000))
    assert num_short > 3


async def test_the_waiting_texts_of_a_client_that_left_are_dropped() -> None:
    app = make_app(scripted_engine("hi", context_length=CONTEXT))
    context, release = app.state.context, threading.Event()
    codec = context.codec = RecordingCodec(server_tokenizer())
    busy = [asyncio.ensure_future(asyncio.wrap_future(context.text_threads.submit(release.wait))) for _ in range(8)]
    try:
        async with listening(app) as url, httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/sample", json={"prompts": ["left"]}, timeout=0.2)
            await asyncio.sleep(0.1)
            release.set()
            stays = await client.post("/v1/sample", json={"prompts": ["stays"], "params": {"max_tokens": 1}})
            assert stays.status_code == 200
    finally:
        release.set()
        await asyncio.gather(*busy, return_exceptions=True)
    assert codec.texts == ["stays"]
