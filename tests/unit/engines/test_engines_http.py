"""Servers as an engine: affinity, failover, and the same answers."""

import asyncio
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from support.processes import free_port
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from support.waits import wait_until
from unbroken.engines.http import HttpEngine
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.errors import (
    ContextOverflowError,
    EngineError,
    InvalidInputError,
    SamplingError,
    ServerBehindError,
    ServerError,
    ServerUnreachableError,
    UnknownPolicyError,
)
from unbroken.types import FinishReason, SampleChunk, SampleRequest, SamplingParams
from unbroken.weights.base import InProcessPublisher
from unbroken.weights.sources import TensorSource


def ask(request_id: str, prompt_ids=(1, 2, 3), n: int = 1, **params) -> SampleRequest:
    params = SamplingParams(**{"max_tokens": 5, **params})
    return SampleRequest(request_id=request_id, prompt_ids=np.array(prompt_ids), n=n, params=params)


async def test_a_closed_engine_samples_nothing() -> None:
    async with listening(make_app(scripted_engine("hi"))) as url:
        engine = await HttpEngine.connect([url])
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.sample(ask("c"))


async def test_the_time_in_the_queue_is_that_of_the_servers_engine() -> None:
    for queue_s in (0.5, None):
        inner = scripted_engine(lambda prompt_ids, wait=queue_s: ScriptedReply(completion_ids=[5, 6], queue_s=wait))
        async with listening(make_app(inner)) as url:
            engine = await HttpEngine.connect([url])
            (whole,) = (await engine.sample(ask("a"))).sequences
            chunks = [chunk async for chunk in engine.stream(ask("b"))]
            assert whole.queue_s == chunks[-1].queue_s == queue_s
            await engine.close()


async def test_it_refuses_before_it_asks() -> None:
    inner = scripted_engine("hi")
    async with listening(make_app(inner)) as url:
        engine = await HttpEngine.connect([url])
        with pytest.raises(ContextOverflowError):
            await engine.sample(ask("a", [1] * 4096))
        with pytest.raises(SamplingError, match="prompt_ids must lie in"):
            await engine.sample(ask("a", [10**6]))
        with pytest.raises(InvalidInputError, match="HttpEngine takes no new weights"):
            InProcessPublisher(engine)
        assert inner.requests == []
        await engine.close()


async def test_the_turns_of_a_conversation_go_to_one_server_and_conversations_to_all() -> None:
    engines = [scripted_engine(lambda prompt_ids: [5], allow_forks=True) for _ in range(3)]
    async with (
        listening(make_app(engines[0])) as one,
        listening(make_app(engines[1])) as two,
        listening(make_app(engines[2])) as three,
    ):
        engine = await HttpEngine.connect([one, two, three])
        for conversation in range(40):
            for turn in range(3):
                await engine.sample(ask(f"{conversation}/{turn}", [conversation + 1, 2]))
        seen = [{int(request.prompt_ids[0]) for request in one_engine.requests} for one_engine in engines]
        assert all(seen)
        assert sum(map(len, seen)) == 40
        await engine.close()


async def test_when_a_server_goes_away_its_conversations_go_on_elsewhere() -> None:
    stays = scripted_engine(lambda prompt_ids: [5], allow_forks=True)
    async with listening(make_app(stays)) as url:
        async with listening(make_app(scripted_engine(lambda prompt_ids: [5], allow_forks=True))) as leaving:
            engine = await HttpEngine.connect([url, leaving], max_retries=0)
            for k in range(24):
                await engine.sample(ask(f"{k}/0"))
            num_before = len(stays.requests)
            assert 0 < num_before < 24
        results = [await engine.sample(ask(f"{k}/1")) for k in range(24)]
        assert [result.sequences[0].completion_ids.tolist() for result in results] == [[5]] * 24
        assert len(stays.requests) == num_before + 24
        await engine.check_health()
        await engine.close()


async def test_no_server_left_is_an_error_and_nothing_hangs() -> None:
    async with listening(make_app(scripted_engine("hi"))) as url:
        engine = await HttpEngine.connect([url], max_retries=0)
    with pytest.raises(EngineError, match="can be reached"):
        await engine.sample(ask("a"))
    with pytest.raises(EngineError, match="healthy"):
        await engine.check_health()
    await engine.close()


async def test_i6_what_a_restarted_server_samples_with_its_first_weights_is_refused_and_asked_of_another() -> None:
    engines = [scripted_engine(lambda prompt_ids: [5], allow_forks=True) for _ in range(2)]
    await engines[0].update_weights(TensorSource([]), policy_version=3)
    async with listening(make_app(engines[0])) as has, listening(make_app(engines[1])) as behind:
        engine = await HttpEngine.connect([has, behind])
        assert engine.policy_version == 3
        engine.require_version(3)
        results = [await engine.sample(ask(f"{k}/0")) for k in range(8)]
        assert {result.sequences[0].version_spans[0].policy_version for result in results} == {3}
        assert len(engines[1].requests) == 1  # the first one, and then it is left alone
        engine.require_version(4)
        with pytest.raises(ServerBehindError, match=r"sampled with policy version ., and 4 was published"):
            await engine.sample(ask("a"))
        for inner in engines:
            await inner.update_weights(TensorSource([]), policy_version=4)
        await engine.sample(ask("b"))
        await engine.close()


class Speaking(ScriptedEngine):
    """An engine of several policies, which updates bring."""

    adapters: tuple[str, ...] = ()


async def test_i6_a_server_that_lacks_policies_of_an_update_that_it_missed_is_left_for_another() -> None:
    has, behind = (
        Speaking(lambda prompt_ids: [5], vocab_size=len(server_tokenizer()), context_length=4096, allow_forks=True)
        for _ in range(2)
    )
    await has.update_weights(TensorSource([]), policy_version=3)
    has.adapters = ("solver", "solver@2")
    async with listening(make_app(has)) as one, listening(make_app(behind)) as two:
        engine = await HttpEngine.connect([one, two])  # a run that continues, after one of its servers was restarted
        assert (engine.policy_version, engine.adapters) == (3, ())
        engine.require_version(3)
        for k in range(8):
            request = replace(ask(f"{k}/0"), adapter="solver")
            if k % 2:
                await engine.sample(request)
            else:
                assert [chunk async for chunk in engine.stream(request)]
        assert [each.adapter for each in has.requests] == ["solver"] * 8
        assert not behind.requests
        with pytest.raises(UnknownPolicyError, match="'critic' does not exist: this server has"):  # nobody missed it
            await engine.sample(replace(ask("a"), adapter="critic"))
        engine.require_version(4)
        with pytest.raises(ServerBehindError, match=r"has policy version \d, and 4 was published: .*'solver@4'"):
            await engine.sample(replace(ask("b"), adapter="solver@4"))
        await engine.close()


async def test_a_server_whose_engine_died_is_left_for_another() -> None:
    stays, dies = (scripted_engine(lambda prompt_ids: [5], allow_forks=True) for _ in range(2))
    async with listening(make_app(stays)) as one, listening(make_app(dies)) as two:
        engine = await HttpEngine.connect([one, two], max_retries=0)
        await dies.close()
        results = [await engine.sample(ask(f"{k}/0")) for k in range(8)]
        assert [result.sequences[0].completion_ids.tolist() for result in results] == [[5]] * 8
        await engine.close()


async def test_streams_and_scores_leave_a_server_whose_engine_died() -> None:
    stays, dies = (scripted_engine(lambda prompt_ids: [5], allow_forks=True) for _ in range(2))
    async with listening(make_app(stays)) as one, listening(make_app(dies)) as two:
        engine = await HttpEngine.connect([one, two], max_retries=0)
        await dies.close()
        for k in range(8):
            chunks = [chunk async for chunk in engine.stream(ask(f"{k}/0"))]
            assert SampleChunk.join(chunks, params=SamplingParams()).completion_ids.tolist() == [5]
            assert len((await engine.score(np.array([1, 2, 3 + k]))).logprobs) == 2
        await engine.close()


async def test_i6_a_stream_of_older_weights_is_an_error_and_its_server_is_left() -> None:
    engines = [scripted_engine(lambda prompt_ids: [5], allow_forks=True) for _ in range(2)]
    await engines[0].update_weights(TensorSource([]), policy_version=3)
    async with listening(make_app(engines[0])) as has, listening(make_app(engines[1])) as behind:
        engine = await HttpEngine.connect([has, behind])
        engine.require_version(3)
        num_refused = 0
        for k in range(8):
            try:
                assert [chunk async for chunk in engine.stream(ask(f"{k}/0"))]
            except ServerBehindError:
                num_refused += 1
        assert num_refused == len(engines[1].requests) == 1
        await engine.close()


async def test_the_requests_of_a_session_go_to_one_server_under_its_name() -> None:
    engines = [scripted_engine(lambda prompt_ids: [5], allow_forks=True) for _ in range(2)]
    async with listening(make_app(engines[0])) as one, listening(make_app(engines[1])) as two:
        engine = await HttpEngine.connect([one, two])
        for k in range(4):
            await engine.sample(replace(ask(f"request {k}"), session_id="a session é"))
        assert sorted(len(inner.requests) for inner in engines) == [0, 4]
        assert {request.session_id for inner in engines for request in inner.requests} == {"a session é"}
        await engine.close()


async def test_an_abort_ends_a_stream_before_its_first_id() -> None:
    inner = scripted_engine(lambda prompt_ids: [5] * 4000)
    async with listening(make_app(inner)) as url:
        engine = await HttpEngine.connect([url])
        await engine.pause()
        running = asyncio.create_task(list_chunks(engine, ask("a", n=2, max_tokens=4000)))
        await asyncio.sleep(0.1)
        await engine.abort("a")
        assert [(chunk.index, chunk.finish_reason) for chunk in await running] == [
            (0, FinishReason.ABORT),
            (1, FinishReason.ABORT),
        ]
        await engine.resume()
        await asyncio.sleep(0.2)
        assert inner.num_sampled < 100
        await engine.close()


async def test_an_abort_in_mid_stream_is_an_error_because_its_versions_are_unknown() -> None:
    inner = scripted_engine(lambda prompt_ids: [5] * 4000)
    async with listening(make_app(inner)) as url:
        engine = await HttpEngine.connect([url])
        with pytest.raises(EngineError, match="'a' was aborted"):
            await abort_at_the_first_chunk(engine, ask("a", max_tokens=4000))
        await asyncio.sleep(0.2)
        assert inner.num_sampled < 4000
        await engine.close()


async def abort_at_the_first_chunk(engine: HttpEngine, request: SampleRequest) -> None:
    async for _ in engine.stream(request):
        await engine.abort(request.request_id)


async def list_chunks(engine: HttpEngine, request: SampleRequest) -> list[SampleChunk]:
    return [chunk async for chunk in engine.stream(request)]


async def test_servers_that_are_not_there_yet_are_waited_for(caplog) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    connecting = asyncio.create_task(HttpEngine.connect([url], wait_s=30.0))
    await wait_until(lambda: caplog.text)
    async with listening(make_app(scripted_engine("hi")), port=int(url.rpartition(":")[2])):
        await (await connecting).close()
    assert f"waiting up to 30 s for ['{url}'] to serve" in caplog.text
    with pytest.raises(ServerUnreachableError, match=r"in 1 tries.*is the server running"):
        await HttpEngine.connect([url], wait_s=0.1)


async def test_an_abort_ends_the_request_here_and_there() -> None:
    inner = scripted_engine(lambda prompt_ids: [5] * 4000)
    async with listening(make_app(inner)) as url:
        engine = await HttpEngine.connect([url])
        await engine.pause()
        running = asyncio.create_task(engine.sample(ask("a", n=2, max_tokens=4000)))
        await asyncio.sleep(0.1)
        await engine.abort("a")
        result = await running
        assert {sequence.finish_reason for sequence in result.sequences} == {FinishReason.ABORT}
        await asyncio.sleep(0.1)
        await engine.resume()
        await asyncio.sleep(0.2)
        assert inner.num_sampled < 100
        assert (await engine.sample(ask("b", max_tokens=1))).sequences[0].completion_ids.tolist() == [5]
        await engine.close()


async def test_servers_of_different_models_are_refused() -> None:
    async with (
        listening(make_app(scripted_engine("hi"))) as one,
        listening(make_app(scripted_engine("hi", context_length=99))) as two,
    ):
        with pytest.raises(EngineError, match="must serve one model"):
            await HttpEngine.connect([one, two])


class _Page(BaseHTTPRequestHandler):
    """Answers every path with the same page, as many a site does."""

    page = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *words: object) -> None:
        pass


ROOM = """{"policy_version": 0, "data": [{"id": "x", "max_model_len": 8, "vocab_size": 9, "adapter_room":
 {"max_adapters": %s, "max_rank": %s, "how": "by hand", "how_rank": %s}}]}"""


@pytest.mark.parametrize(
    "page",
    [b"<html>", b"\xff", b"{}", b"[]", b'{"data": []}', b'{"data": ["x"]}', b'{"data": [{"id": "x"}]}',
     b'{"data": [{"id": "x", "max_model_len": 8, "vocab_size": 9}]}',
     *((ROOM % each).encode() for each in (
         ("1e999", "8", '""'), ("2.9", "8", '""'), ('"3"', "8", '""'), ("-1", "8", '""'), ("true", "8", '""'),
         ("3", "-1", '""'), ("3", "8", "null"))),
    ],
)  # fmt: skip
async def test_the_address_of_another_server_is_an_error_that_names_it_and_what_came(page: bytes) -> None:
    handler = type("_", (_Page,), {"page": page})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ServerError, match=f"{url} answered .* is this its address"):
            await HttpEngine.connect([url], max_retries=0)
        server.shutdown()
