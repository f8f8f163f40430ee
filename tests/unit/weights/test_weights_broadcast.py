"""Weights to servers by broadcast, over gloo: a server has a whole version, or samples nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.models import tiny_qwen3
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from unbroken.client import AsyncClient
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, InvalidInputError, ServerError, ServerUnreachableError, WeightsError
from unbroken.types import InFlight, SamplingParams, token_ids
from unbroken.weights.base import WeightPublisher
from unbroken.weights.broadcast import BroadcastPublisher
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.receiver import WireSource
from unbroken.weights.sources import TensorSource, TensorSpec, WeightStream
from unbroken.weights.wire import PackedGroup, Rendezvous, Transport, listen

IDS = token_ids([1, 2, 3, 4, 5])
MEETING = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2}


def model(seed: int) -> Any:
    return tiny_qwen3(vocab_size=len(server_tokenizer()), seed=seed)


@asynccontextmanager
async def servers(number: int = 1, **config: Any) -> AsyncIterator[list[AsyncClient]]:
    """Clients of so many servers, all with version 0 of the weights."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(number):
            engine = TransformersEngine(model(0))
            stack.push_async_callback(engine.close)
            url = await stack.enter_async_context(listening(make_app(engine, **config)))
            key = config.get("admin_key")
            clients.append(await stack.enter_async_context(AsyncClient(url, max_retries=0, api_key=key)))
        yield clients


@asynccontextmanager
async def publishing(clients: list[AsyncClient], **options: Any) -> AsyncIterator[BroadcastPublisher]:
    publisher = BroadcastPublisher(clients, **{"bucket_bytes": 4096, "timeout_s": 10.0, **options})
    yield publisher
    publisher.close()


async def scores(client: AsyncClient) -> Any:
    (scored,) = await client.score([IDS])
    return scored.logprobs


async def scores_of(seed: int) -> Any:
    engine = TransformersEngine(model(seed))
    expected = (await engine.score(IDS)).logprobs
    await engine.close()
    return expected


async def test_i6_every_server_samples_with_the_new_weights_and_says_so() -> None:
    async with servers(2, admin_key="secret") as clients, publishing(clients) as publisher:
        assert isinstance(publisher, WeightPublisher)
        for version, seed in ((7, 1), (8, 2)):
            update = await publisher.publish(model(seed).named_parameters(), policy_version=version)
            for client in clients:
                np.testing.assert_array_equal(await scores(client), await scores_of(seed))
                assert await client.policy_version() == version
    assert update.num_bytes > 10_000
    assert update.seconds > update.phases_s["send"] > 0


@pytest.mark.parametrize("bucket_bytes", [1, 16, 2**20])
async def test_weights_of_all_dtypes_and_shapes_arrive_as_they_were(bucket_bytes: int) -> None:
    received: dict[str, torch.Tensor] = {}
    engine = scripted_engine("never")
    engine._load = received.update  # type: ignore[method-assign, assignment]
    sent = {
        "float32": torch.arange(105.0).view(3, 5, 7),
        "not contiguous": torch.arange(12.0).view(3, 4).T,
        "bfloat16": torch.randn(3).bfloat16(),
        "one byte": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "float64": torch.randn(2, 2, dtype=torch.float64),
    }
    async with (
        listening(make_app(engine)) as url,
        AsyncClient(url) as client,
        publishing([client], bucket_bytes=bucket_bytes) as publisher,
    ):
        await publisher.publish(sent.items(), policy_version=1)
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


async def test_a_version_that_all_servers_have_is_not_sent_again() -> None:
    async with servers(2) as clients, publishing(clients) as publisher:
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        again = await publisher.publish(model(1).named_parameters(), policy_version=1)
        assert again.phases_s == {}
        async with publishing(clients) as another:
            assert (await another.publish(model(1).named_parameters(), policy_version=1)).phases_s == {}
            with pytest.raises(WeightsError, match="has version 1 with other weights"):
                await another.publish(model(2).named_parameters(), policy_version=1)


async def test_a_version_that_one_server_has_is_sent_to_the_others() -> None:
    async with servers(2) as clients:
        async with publishing(clients[:1]) as first:
            await first.publish(model(1).named_parameters(), policy_version=4)
        async with publishing(clients) as publisher:
            await publisher.publish(model(1).named_parameters(), policy_version=4)
            await publisher.publish(model(2).named_parameters(), policy_version=5)
        for client in clients:
            np.testing.assert_array_equal(await scores(client), await scores_of(2))


async def test_one_server_that_refuses_keeps_all_from_loading_and_the_next_update_works() -> None:
    other = scripted_engine("never")
    async with (
        servers(1) as (client,),
        listening(make_app(other)) as url,
        AsyncClient(url, max_retries=0) as ahead,
        publishing([client, ahead]) as publisher,
    ):
        await other.update_weights(TensorSource([]), policy_version=5)
        with pytest.raises(EngineError, match=r"not taken by 1 of 2 servers .*policy_version must rise above 5"):
            await publisher.publish(model(1).named_parameters(), policy_version=3)
        assert await client.policy_version() == 0
        np.testing.assert_array_equal(await scores(client), await scores_of(0))
        await publisher.publish(model(1).named_parameters(), policy_version=6)
        assert [await client.policy_version(), await ahead.policy_version()] == [6, 6]


async def test_one_server_that_does_not_meet_the_trainer_is_not_waited_for() -> None:
    class Refuses(AsyncClient):
        async def transfer_weights(self, step: str, body: Any) -> dict[str, Any]:
            raise InvalidInputError("no")

    async with servers(2) as (client, other), Refuses(other.base_url, max_retries=0) as refuses:
        async with publishing([client, refuses], timeout_s=60.0) as publisher:
            began = time.monotonic()
            with pytest.raises(EngineError, match=r"not taken by 2 of 2 servers: no \("):
                await publisher.publish(model(1).named_parameters(), policy_version=1)
            assert time.monotonic() - began < 20
        async with publishing([client, other]) as publisher:
            await publisher.publish(model(1).named_parameters(), policy_version=1)


async def test_a_server_that_hangs_while_it_loads_has_failed_after_a_while() -> None:
    class Slow(AsyncClient):
        async def transfer_weights(self, step: str, body: Any) -> dict[str, Any]:
            answer = await super().transfer_weights(step, body)
            if step == "finish_weight_update":
                await asyncio.sleep(60)
            return answer

    async with (
        listening(make_app(scripted_engine("never"))) as url,
        Slow(url, max_retries=0) as slow,
        publishing([slow], timeout_s=3.0) as publisher,
    ):
        with pytest.raises(
            EngineError, match=r"not taken by 1 of 1 servers: 1 of 1 servers did not answer within 3 s .*no answer"
        ):
            await publisher.publish(model(1).named_parameters(), policy_version=1)


async def test_a_server_that_is_down_is_named_and_holds_nobody_up() -> None:
    async with servers(1) as (client,), AsyncClient("http://127.0.0.1:9", max_retries=0) as nobody:
        async with publishing([client, nobody]) as publisher:
            for version in (1, 2):
                update = await publisher.publish(model(version).named_parameters(), policy_version=version)
                assert update.missed_by == ("http://127.0.0.1:9",)
                np.testing.assert_array_equal(await scores(client), await scores_of(version))
        async with publishing([nobody]) as alone:
            with pytest.raises(ServerUnreachableError, match=r"no server is healthy.*http://127\.0\.0\.1:9"):
                await alone.publish(model(1).named_parameters(), policy_version=1)


async def test_a_server_that_goes_away_between_two_updates_is_left_out_of_the_second() -> None:
    async with servers(1) as (client,), AsyncExitStack() as stack:
        other = TransformersEngine(model(0))
        url = await stack.enter_async_context(listening(make_app(other)))
        gone = AsyncClient(url, max_retries=0)
        async with publishing([client, gone]) as publisher:
            await publisher.publish(model(1).named_parameters(), policy_version=1)
            await stack.aclose()
            update = await publisher.publish(model(2).named_parameters(), policy_version=2)
            assert update.missed_by == (url,)
        np.testing.assert_array_equal(await scores(client), await scores_of(2))
        await gone.close()
        await other.close()


async def test_a_server_that_was_started_again_meets_the_trainer_anew() -> None:
    engines = [TransformersEngine(model(0)) for _ in range(2)]
    apps = [make_app(engine) for engine in engines]
    async with listening(apps[0]) as url, AsyncClient(url, max_retries=0) as client:
        async with publishing([client], timeout_s=60.0) as publisher:
            await publisher.publish(model(1).named_parameters(), policy_version=1)
            apps[0].state.context = apps[1].state.context
            began = time.monotonic()
            await publisher.publish(model(2).named_parameters(), policy_version=2)
            assert time.monotonic() - began < 30  # nobody waited for the group that had met without it
        np.testing.assert_array_equal(await scores(client), await scores_of(2))
    for engine in engines:
        await engine.close()


async def test_what_one_server_lacks_is_found_before_another_has_loaded() -> None:
    small, large = TransformersEngine(model(0)), TransformersEngine(tiny_qwen3(vocab_size=512))
    async with AsyncExitStack() as stack:
        clients = []
        for engine in (small, large):
            stack.push_async_callback(engine.close)
            url = await stack.enter_async_context(listening(make_app(engine)))
            clients.append(await stack.enter_async_context(AsyncClient(url, max_retries=0)))
        async with publishing(clients) as publisher:
            with pytest.raises(EngineError, match=r"not taken by 1 of 2 servers.* must have shape"):
                await publisher.publish(model(1).named_parameters(), policy_version=1)
        assert (small.policy_version, large.policy_version) == (0, 0)
        np.testing.assert_array_equal(await scores(clients[0]), await scores_of(0))


async def test_i6_weights_that_are_damaged_on_the_way_are_not_sampled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers(2) as clients, publishing(clients) as publisher:
        monkeypatch.setattr(WireSource, "digest", property(lambda self: "other"))
        with pytest.raises(EngineError, match=r"not taken by 2 of 2 servers .*their digests differ"):
            await publisher.publish(model(1).named_parameters(), policy_version=1)
        monkeypatch.undo()
        for client in clients:
            assert not await client.health()
            assert await client.takes_weights()
            with pytest.raises(ServerError, match=r"ended half-way.*publish a whole version"):
                await scores(client)
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        for client in clients:
            assert await client.health()
            np.testing.assert_array_equal(await scores(client), await scores_of(1))


async def test_i6_weights_that_are_not_finite_are_not_sampled_with() -> None:
    broken = dict(model(1).named_parameters())
    name = list(broken)[3]
    with torch.no_grad():
        broken[name].view(-1)[2] = float("nan")
    async with servers() as (client,), publishing([client]) as publisher:
        with pytest.raises(EngineError, match=f"weight '{name}' has numbers that are not finite"):
            await publisher.publish(broken.items(), policy_version=1)
        assert not await client.health()
        await publisher.publish(model(2).named_parameters(), policy_version=1)
        np.testing.assert_array_equal(await scores(client), await scores_of(2))


async def test_a_server_that_waits_for_whole_weights_gets_them_from_files_too(tmp_path: Path) -> None:
    async with servers(1, weights_dir=tmp_path) as (client,), publishing([client]) as publisher:
        with pytest.raises(ZeroDivisionError):
            await publisher.publish(WeightStream(*_breaking(model(1), 5)), policy_version=1)
        assert not await client.health()
        files = DiskPublisher([client], tmp_path)
        await files.publish(model(2).named_parameters(), policy_version=1)
        assert await client.health()
        np.testing.assert_array_equal(await scores(client), await scores_of(2))


def _breaking(sent: Any, number: int) -> tuple[list[TensorSpec], Iterator[tuple[str, torch.Tensor]]]:
    """Weights that fail when so many were read."""
    weights = list(sent.named_parameters())

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:number]
        raise ZeroDivisionError

    return [TensorSpec.of(*named) for named in weights], read()


async def test_other_weights_under_a_version_that_one_server_has_are_sampled_by_nobody_else() -> None:
    async with servers(2) as clients:
        async with publishing(clients[:1]) as first:
            await first.publish(model(1).named_parameters(), policy_version=4)
        async with publishing(clients) as publisher:
            with pytest.raises(WeightsError, match="has version 4 with other weights"):
                await publisher.publish(model(2).named_parameters(), policy_version=4)
            assert not await clients[1].health()
        assert [await client.policy_version() for client in clients] == [4, 0]


async def test_a_stream_is_read_once_and_two_chunks_of_it_are_held() -> None:
    weights = list(model(1).named_parameters())
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            copy = weight.detach().double()
            made.append(weakref.ref(copy))
            alive.append(sum(one() is not None for one in made))
            yield name, copy

    specs = [TensorSpec(name=name, dtype="float64", shape=tuple(weight.shape)) for name, weight in weights]
    async with servers(2) as clients, publishing(clients, bucket_bytes=4096) as publisher:
        update = await publisher.publish(WeightStream(specs, read()), policy_version=1)
        assert update.num_bytes == sum(weight.numel() * 4 for _, weight in weights)  # in the servers' float32
        for client in clients:
            np.testing.assert_array_equal(await scores(client), await scores_of(1))
    assert len(made) == len(weights)
    assert max(alive) <= 2


async def test_a_server_that_goes_away_while_a_stream_is_read_is_an_outage_and_then_left_out() -> None:
    class Dies(AsyncClient):
        is_dead = False

        async def transfer_weights(self, step: str, body: Any) -> dict[str, Any]:
            if step == "update_weights":
                while not begun.is_set():  # noqa: ASYNC110  # in another thread
                    await asyncio.sleep(0.001)
                self.is_dead = True
                raise ServerUnreachableError("gone")
            return await super().transfer_weights(step, body)

        async def takes_weights(self) -> bool:
            return not self.is_dead and await super().takes_weights()

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights:
            begun.set()
            yield named

    begun = threading.Event()
    weights = list(model(1).named_parameters())
    specs = [TensorSpec.of(*named) for named in weights]
    async with (
        servers(2) as (client, other),
        Dies(other.base_url, max_retries=0) as dies,
        publishing([client, dies], bucket_bytes=64) as publisher,
    ):
        with pytest.raises(ServerUnreachableError, match="not taken by"):
            await publisher.publish(WeightStream(specs, read()), policy_version=1)
        assert await client.policy_version() == 0
        update = await publisher.publish(WeightStream(specs, read()), policy_version=1)
        assert update.missed_by == (other.base_url,)
        assert await client.policy_version() == 1


async def test_a_stream_that_was_not_begun_reaches_a_server_that_was_started_again() -> None:
    engines = [TransformersEngine(model(0)) for _ in range(2)]
    apps = [make_app(engine) for engine in engines]
    async with listening(apps[0]) as url, AsyncClient(url, max_retries=0) as client, publishing([client]) as publisher:
        for version, app in ((1, apps[0]), (2, apps[1])):
            apps[0].state.context = app.state.context
            weights = list(model(version).named_parameters())
            stream = WeightStream([TensorSpec.of(*named) for named in weights], iter(weights))
            await publisher.publish(stream, policy_version=version)
        np.testing.assert_array_equal(await scores(client), await scores_of(2))
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_info": {**MEETING, "rank_offset": 2}}, "world_size must count the trainer and all workers, got 2 with"),
        ({"transport": "nccl"}, "nccl needs a GPU, and this worker is on cpu: use gloo"),
        ({"timeout_s": "1"}, "timeout_s must be a valid number, got '1'"),
        ({}, r"the group of 2 did not meet at 127\.0\.0\.1:9 within 1 s"),
    ],
)
async def test_a_meeting_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    body = {"init_info": MEETING, "timeout_s": 1.0, **change}
    async with listening(make_app(scripted_engine("never"))) as url, AsyncClient(url, max_retries=0) as client:
        with pytest.raises(InvalidInputError, match=message):
            await client.transfer_weights("init_weight_transfer_engine", body)


async def test_a_rendezvous_that_never_comes_together_times_out_on_both_sides() -> None:
    listener = listen("127.0.0.1")
    meeting = Rendezvous(
        host="127.0.0.1",
        port=listener.getsockname()[1],
        first_rank=1,
        world_size=3,
        transport=Transport.GLOO,
        join_timeout_s=1.0,
        timeout_s=1.0,
    )
    members = [
        asyncio.to_thread(PackedGroup, meeting, rank=rank, device=torch.device("cpu"), listener=socket)
        for rank, socket in ((0, listener), (1, None))
    ]
    for failure in await asyncio.gather(*members, return_exceptions=True):
        assert isinstance(failure, WeightsError)
        assert "the group of 3 did not meet" in str(failure)


_TRAINER = """
import asyncio, json, sys, time
import torch
from unbroken.client import AsyncClient
from unbroken.weights.broadcast import BroadcastPublisher

class Slow(torch.Tensor):
    def detach(self):
        print("sending", flush=True)
        time.sleep(60)

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        weights = [(name, torch.zeros(shape)) for name, shape in json.loads(sys.argv[2])]
        weights[5] = weights[5][0], weights[5][1].as_subclass(Slow)
        await BroadcastPublisher([client], bucket_bytes=64).publish(weights, policy_version=1)

asyncio.run(main())
"""


async def test_i6_a_server_whose_trainer_is_killed_in_mid_broadcast_samples_nothing_until_the_next_update() -> None:
    shapes = json.dumps([(name, list(weight.shape)) for name, weight in model(1).named_parameters()])
    async with servers(1) as (client,):
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TRAINER, client.base_url, shapes, stdout=subprocess.PIPE
        )
        assert trainer.stdout is not None
        assert await trainer.stdout.readline() == b"sending\n"
        trainer.send_signal(signal.SIGKILL)
        await trainer.wait()
        with pytest.raises(ServerError, match=r"version 1 ended half-way: the trainer is gone"):
            await scores(client)
        assert not await client.health()
        assert (await client.weights_state())["digest"] is None
        async with publishing([client]) as publisher:
            began = time.monotonic()
            await publisher.publish(model(1).named_parameters(), policy_version=1)
            assert time.monotonic() - began < 30
        np.testing.assert_array_equal(await scores(client), await scores_of(1))


_SERVER = """
import socket, uvicorn
from support.models import tiny_qwen3
from support.servers import make_app, server_tokenizer
from unbroken.engines.transformers import TransformersEngine

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = make_app(TransformersEngine(tiny_qwen3(vocab_size=len(server_tokenizer()), seed=0)))
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""


async def test_i6_a_server_that_is_killed_in_mid_broadcast_is_named_and_the_other_gets_the_version_whole() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-c", _SERVER)
    killed = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    assert killed.stdout is not None
    url = f"http://127.0.0.1:{int(await killed.stdout.readline())}"

    class Killing(torch.Tensor):
        def detach(self) -> torch.Tensor:
            if killed.returncode is None:
                killed.send_signal(signal.SIGKILL)
            return self.as_subclass(torch.Tensor)  # type: ignore[no-any-return]

    weights = list(model(1).named_parameters())
    sent: Any = [(name, w.detach().as_subclass(Killing) if k == 5 else w) for k, (name, w) in enumerate(weights)]
    async with servers(1) as (client,), AsyncClient(url, max_retries=0) as other:
        await wait_until_async(other.health)
        async with publishing([client, other], bucket_bytes=64) as publisher:
            update = await publisher.publish(sent, policy_version=1)
            assert update.missed_by == (url,)
        np.testing.assert_array_equal(await scores(client), await scores_of(1))
        assert await client.health()
    await killed.wait()


async def wait_until_async(is_so: Any) -> None:
    async with asyncio.timeout(120):
        while not await is_so():  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.1)


async def test_requests_can_finish_before_weights_are_loaded() -> None:
    async with servers(1) as (client,), publishing([client], in_flight=InFlight.FINISH) as publisher:
        running = asyncio.create_task(client.generate([IDS], SamplingParams(max_tokens=100)))
        await asyncio.sleep(0.05)
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        (result,) = await running
        assert len(result.sequences[0].version_spans) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"timeout_s": 0.0}, "timeout_s must be > 0"), ({"bucket_bytes": 0}, "bucket_bytes must be at least 1")],
)
async def test_a_publisher_checks_its_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BroadcastPublisher([AsyncClient("http://127.0.0.1:9")], **options)
    with pytest.raises(InvalidInputError, match="at least one client"):
        BroadcastPublisher([])
