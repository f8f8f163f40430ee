"""The client against a live server: what it returns, what it retries, what its errors say."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.servers import MODEL, encode, listening, make_app, scripted_engine
from unbroken import compact
from unbroken.client import AsyncClient, Client, calls
from unbroken.client.connections import Connections
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import (
    ContextOverflowError,
    EchoError,
    InvalidInputError,
    SamplingError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
)
from unbroken.server.config import ServerLimits
from unbroken.types import SampleChunk, SampleRequest, SamplingParams


@pytest.fixture
def engine() -> ScriptedEngine:
    return scripted_engine(lambda prompt_ids: [*prompt_ids[:3].tolist(), 7, 8], logprob=-1.2345678)


@pytest.fixture
async def url(engine: ScriptedEngine) -> AsyncIterator[str]:
    async with listening(make_app(engine, api_key="key")) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, api_key="key") as client:
        yield client


async def test_generate_returns_what_the_engine_sampled_bit_for_bit(client: AsyncClient, engine) -> None:
    params = SamplingParams(max_tokens=9, num_top_logprobs=3, temperature=0.7, stop_token_ids=(8,))
    results = await client.generate([[1, 2, 3, 4], np.array([5], dtype=np.int32)], params, n=2)
    for result, prompt_ids in zip(results, ([1, 2, 3, 4], [5]), strict=True):
        request = SampleRequest(request_id="x", prompt_ids=np.array(prompt_ids), params=params, n=2)
        expected = await engine.sample(request)
        result.check_answers(request)
        for sequence, other in zip(result.sequences, expected.sequences, strict=True):
            assert sequence.completion_ids.tolist() == other.completion_ids.tolist()
            assert sequence.rollout_logprobs.tobytes() == other.rollout_logprobs.tobytes()
            assert sequence.top_logprobs.logprobs.tobytes() == other.top_logprobs.logprobs.tobytes()
            assert sequence.version_spans == other.version_spans
            assert (sequence.finish_reason, sequence.temperature) == (other.finish_reason, 0.7)


async def test_texts_are_encoded_by_the_server(client: AsyncClient) -> None:
    (result,) = await client.generate(["hello"], SamplingParams(max_tokens=1))
    assert result.prompt_ids.tolist() == encode("hello")
    assert (await client.tokenize("hello")).tolist() == encode("hello")


async def test_a_stream_joins_to_what_generate_returns(client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=9, num_top_logprobs=2)
    (whole,) = await client.generate([[1, 2, 3]], params, n=2)
    chunks: list[list[SampleChunk]] = [[], []]
    async for chunk in client.stream([1, 2, 3], params, n=2):
        chunks[chunk.index].append(chunk)
    for own, sequence in zip(chunks, whole.sequences, strict=True):
        joined = SampleChunk.join(own, params=SamplingParams())
        assert joined.completion_ids.tolist() == sequence.completion_ids.tolist()
        assert joined.rollout_logprobs.tobytes() == sequence.rollout_logprobs.tobytes()
        assert joined.version_spans == sequence.version_spans


async def test_scores_come_back(client: AsyncClient) -> None:
    first, second = await client.score([[1, 2, 3], [4]], num_top_logprobs=2)
    assert first.logprobs.tolist() == [np.float32(-1.2345678)] * 2
    assert first.top_logprobs.token_ids[:, 0].tolist() == [2, 3]
    assert second.logprobs.shape == (0,)


async def test_chat_and_chat_tokens_carry_ids(client: AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat(messages, max_tokens=3)
    assert len(answer["choices"][0]["token_ids"]) == 3
    continued = await client.chat_tokens([5, 6, 7], messages, max_tokens=3)
    assert continued["prompt_token_ids"] == [5, 6, 7]
    assert (await client.models())[0]["id"] == MODEL


async def test_the_servers_words_come_back_as_our_errors(client: AsyncClient, url: str) -> None:
    with pytest.raises(SamplingError, match=r"prompts\[1\]: prompt_ids must lie in"):
        await client.generate([[1], [10**6]])
    with pytest.raises(ContextOverflowError, match="maximum context length is 4096 tokens") as caught:
        await client.generate([[1] * 4096])
    assert (caught.value.context_length, caught.value.num_prompt_tokens) == (4096, 4096)
    with pytest.raises(InvalidInputError, match="must hold ids >= 0, got -1"):
        await client.generate([[-1]])
    async with AsyncClient(url, api_key="wrong") as stranger:
        with pytest.raises(ServerError, match=r"401.*API key"):
            await stranger.generate([[1]])


async def test_a_server_that_is_full_is_asked_again_and_then_given_up() -> None:
    engine = scripted_engine(lambda prompt_ids: [7] * 4000)
    app = make_app(engine, limits=ServerLimits(max_queued=1, retry_after_s=1))
    long = SamplingParams(max_tokens=4000)
    async with listening(app) as url, AsyncClient(url) as patient, AsyncClient(url, max_retries=0) as hasty:
        await engine.pause()
        running = asyncio.create_task(patient.generate([[1]], long))
        await asyncio.sleep(0.1)
        with pytest.raises(ServerBusyError, match="max_queued"):
            await hasty.generate([[1]])
        waiting = asyncio.create_task(patient.generate([[2]], SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.1)
        await engine.resume()
        await running
        ((sequence,),) = [result.sequences for result in await waiting]
        assert sequence.completion_ids.tolist() == [7]


async def test_the_error_for_an_absent_server_has_its_address() -> None:
    async with AsyncClient("http://127.0.0.1:9", max_retries=1) as client:
        with pytest.raises(ServerUnreachableError, match=r"127.0.0.1:9 in 2 tries.*is the server running"):
            await client.generate([[1]])
        assert not await client.health()


class _BreaksOnce(httpx.AsyncBaseTransport):
    """A network that loses the first answer after the server has given it."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self._broke = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if not self._broke:
            self._broke = True
            await response.aread()
            raise httpx.ReadError("connection lost")
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_a_lost_answer_is_fetched_again_and_not_sampled_again(engine: ScriptedEngine, url: str) -> None:
    async with AsyncClient(url, api_key="key", transport=_BreaksOnce()) as client:
        (result,) = await client.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert result.sequences[0].completion_ids.tolist() == [1, 2, 3, 7]
    assert len(engine.requests) == 1


async def test_a_stream_of_another_prompt_is_an_echo_error() -> None:
    engine = scripted_engine("hi", echo=lambda prompt_ids: prompt_ids[:-1])
    async with listening(make_app(engine)) as url, AsyncClient(url) as client:
        with pytest.raises((EchoError, ServerError)):
            async for _ in client.stream([1, 2, 3]):
                pass


@pytest.mark.parametrize(
    ("reported", "is_ours"),
    [("[5,6]", True), ("[5, 6]", True), ("[5,6,7]", False), ("[5]", False), ("[6,5]", False), ("true", False)],
)
async def test_the_prompt_of_a_stream_is_compared_in_any_spelling(reported: str, is_ours: bool) -> None:
    event = {"index": 0, "completion_ids": [7], "rollout_logprobs": [-1.0], "top_logprobs": None}
    rest = json.dumps({**event, "finish_reason": "stop", "policy_versions": [[0, 1, 0]]})[1:]
    text = f'data: {{"prompt_ids":{reported},"image_sha256s":[], {rest}\n\ndata: [DONE]\n\n'
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    async with AsyncClient("http://server", transport=transport) as client:
        if is_ours:
            (chunk,) = [chunk async for chunk in client.stream([5, 6])]
            assert chunk.completion_ids.tolist() == [7]
        else:
            with pytest.raises(EchoError):
                [chunk async for chunk in client.stream([5, 6])]


async def test_numbers_that_are_not_finite_are_not_sent_as_null(client: AsyncClient) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        await client.chat([{"role": "user", "content": "hi"}], temperature=float("nan"))
    with pytest.raises(SamplingError, match="seed"):
        await client.chat([{"role": "user", "content": "hi"}], seed=2**70)


async def test_ids_are_sent_beside_what_orjson_refuses(client: AsyncClient) -> None:
    with pytest.raises(SamplingError, match="seed"):
        await client.chat_tokens([1, 2], [{"role": "user", "content": "hi"}], seed=2**70)


def test_the_plain_client_needs_no_event_loop() -> None:
    ready, done = asyncio.Event(), asyncio.Event()
    found = {}

    async def serve() -> None:
        async with listening(make_app(scripted_engine(lambda prompt_ids: [7, 8]))) as url:
            found["url"] = url
            found["loop"] = asyncio.get_running_loop()
            ready.set()
            await done.wait()

    async def both() -> None:
        task = asyncio.create_task(serve())
        await ready.wait()
        found["result"] = await asyncio.to_thread(use, found["url"])
        done.set()
        await task

    def use(url: str):
        with Client(url) as client:
            assert client.health()
            return client.generate([[1]]), client.score([[1, 2]]), client.tokenize("hello")

    asyncio.run(both())
    generated, scored, ids = found["result"]
    assert generated[0].sequences[0].completion_ids.tolist() == [7, 8]
    assert len(scored[0].logprobs) == 1
    assert ids.tolist() == encode("hello")


@pytest.mark.parametrize(
    ("session_id", "expected"), [("one", "one"), (None, None), ("é", None), ("a\r\nb", None), ("a ", None)]
)
async def test_the_name_of_a_conversation_is_a_header_for_load_balancers(
    session_id: str | None, expected: str | None
) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"results": []})

    async with AsyncClient("http://server", transport=httpx.MockTransport(answer)) as client:
        await client.generate([[1]], session_id=session_id)
    (request,) = seen
    assert request.headers.get("X-Session-ID") == expected
    assert json.loads(request.content)["session_id"] == session_id


async def test_weights_that_a_server_holds_under_the_same_version_are_the_callers_error() -> None:
    conflict = {"error": {"message": "version 3 is in use", "code": "version_in_use"}}
    transport = httpx.MockTransport(lambda request: httpx.Response(409, json=conflict))
    async with AsyncClient("http://server", transport=transport) as client:
        with pytest.raises(SamplingError, match="version 3 is in use"):
            await client.load_weights(Path("x"), policy_version=3)


async def test_ids_are_sent_as_bytes_once_the_server_has_said_that_it_takes_them(url: str) -> None:
    sent: list[str] = []

    class Watched(Connections):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            sent.append(request.headers["content-type"])
            return await super().handle_async_request(request)

    async with AsyncClient(url, api_key="key", transport=Watched()) as client:
        results = [await client.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4), n=2) for _ in range(2)]
        texts = await client.generate(["a"], SamplingParams(max_tokens=4))
        with pytest.raises(InvalidInputError, match=r"prompts.* in the vocabulary|id"):
            await client.generate([[2**30]])
    # The refused one was asked once more as JSON.
    assert sent == ["application/json", *[compact.MEDIA_TYPE] * 3, "application/json"]
    for first, second in zip(*results, strict=True):
        assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
        assert [one.completion_ids.tolist() for one in first.sequences] == [
            one.completion_ids.tolist() for one in second.sequences
        ]
    assert texts[0].prompt_ids.tolist() == encode("a")


@pytest.mark.parametrize("status", [400, 415, 422])
async def test_a_server_that_no_longer_takes_bytes_gets_json_once_more(status: int) -> None:
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["content-type"])
        if sent[-1] == compact.MEDIA_TYPE:
            return httpx.Response(status, json={"error": {"message": "the body must be JSON"}})
        takes = {compact.ACCEPT_HEADER: compact.MEDIA_TYPE} if len(sent) == 1 else {}
        return httpx.Response(200, json={"results": []}, headers=takes)

    async with AsyncClient("http://server", transport=httpx.MockTransport(answer)) as client:
        for _ in range(3):
            await client.generate([[1]])
    assert sent == ["application/json", compact.MEDIA_TYPE, "application/json", "application/json"]


async def test_a_user_in_the_url_is_sent_as_a_header_and_shown_nowhere() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"results": []})

    async with AsyncClient("http://me:p%40ss@server/pre/", transport=httpx.MockTransport(answer)) as client:
        await client.generate([[1]])
        assert client.base_url == "http://server/pre"
    (request,) = seen
    assert request.headers["Authorization"] == httpx.BasicAuth("me", "p@ss")._auth_header
    assert request.headers["User-Agent"] == "unbroken"
    with pytest.raises(InvalidInputError, match=r"api_key.*base_url"):
        AsyncClient("http://me:pass@server", api_key="key")
    with pytest.raises(InvalidInputError, match="api_key must be printable"):
        AsyncClient("http://server", api_key="key\n")


class _Answers(httpx.AsyncBaseTransport):
    """Answers with a status and parts of a body, and counts the parts that were asked for."""

    def __init__(self, status: int, parts: list[bytes], **headers: str) -> None:
        self._answer, self._parts, self.num_read, self.is_closed = (status, headers), parts, 0, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        status, headers = self._answer
        return httpx.Response(status, headers=headers, stream=_Parts(self))


class _Parts(httpx.AsyncByteStream):
    def __init__(self, answers: _Answers) -> None:
        self._answers = answers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._answers._parts:
            self._answers.num_read += 1
            yield part

    async def aclose(self) -> None:
        self._answers.is_closed = True


async def _read_all(call: Awaitable[AsyncIterator[object]]) -> None:
    async for _ in await call:
        pass


ANSWER_LIMITS = {"MAX_ANSWER_BYTES": 1000, "MAX_ERROR_BYTES": 100}


@pytest.mark.parametrize(("status", "most"), [(200, 1000), (500, 100), (400, 100)])
@pytest.mark.parametrize("call", ["post", "get", "get_bytes", "post_without_retry", "open_stream", "health"])
async def test_an_answer_without_end_is_refused_by_every_call_before_it_is_read_on(
    monkeypatch: pytest.MonkeyPatch, status: int, most: int, call: str
) -> None:
    for name, value in ANSWER_LIMITS.items():
        monkeypatch.setattr(calls, name, value)
    answers = _Answers(status, [b"[" * 50] * 1000)
    async with AsyncClient("http://server", max_retries=0, transport=answers) as client:
        if call == "health":
            assert not await client.health()
        else:
            body: dict[str, Any] = {"body": {}} if call.startswith(("post", "open")) else {}
            with pytest.raises(ServerError, match=rf"at most {most} bytes.*server to /path with status {status}"):
                await _read_all(getattr(client._calls, call)("/path", **body))
    assert answers.is_closed
    assert answers.num_read == most // 50 + 1


async def test_an_answer_is_counted_as_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 1000)
    for number, is_short in ((900, True), (100_000, False)):
        packed = gzip.compress(json.dumps(" " * (number - 2)).encode())
        assert len(packed) < 500
        answers = _Answers(200, [packed], **{"Content-Encoding": "gzip"})
        async with AsyncClient("http://server", transport=answers) as client:
            if is_short:
                assert await client._calls.get("/path") == " " * (number - 2)
            else:
                with pytest.raises(ServerError, match="at most 1000 bytes"):
                    await client._calls.get("/path")


async def test_a_stream_may_be_longer_than_one_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 100)
    event = b'data: {"a": "' + b"x" * 60 + b'"}\n\n'
    parts = [event[:30], event[30:], *[event] * 98, b"data: [DONE]\n\n"]
    async with AsyncClient("http://server", transport=_Answers(200, parts)) as client:
        events = [each async for each in await client._calls.open_stream("/path", {})]
    assert events == [{"a": "x" * 60}] * 99
