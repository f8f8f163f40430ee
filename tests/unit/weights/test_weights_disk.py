"""Weights to servers through files: whole, versioned, and old ones where the new ones cannot be."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.models import tiny_qwen3
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from support.waits import wait_until
from unbroken.client import AsyncClient
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, InvalidInputError, ServerUnreachableError
from unbroken.types import SamplingParams, token_ids
from unbroken.weights.base import WeightPublisher
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.files import write_weights
from unbroken.weights.sources import TensorSource
from unbroken.weights.store import VersionStore

IDS = token_ids([1, 2, 3, 4, 5])


def model(seed: int) -> Any:
    return tiny_qwen3(vocab_size=len(server_tokenizer()), seed=seed)


def list_versions(folder: Path) -> list[int]:
    """The versions in a folder, lowest first."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("version-*"))


@asynccontextmanager
async def servers(folder: Path, number: int = 1, **config: Any) -> AsyncIterator[list[AsyncClient]]:
    """Clients of so many servers, all with version 0 of the weights."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(number):
            engine = TransformersEngine(model(0))
            stack.push_async_callback(engine.close)
            url = await stack.enter_async_context(listening(make_app(engine, weights_dir=folder, **config)))
            clients.append(await stack.enter_async_context(AsyncClient(url, max_retries=0)))
        yield clients


async def scores(client: AsyncClient) -> Any:
    (scored,) = await client.score([IDS])
    return scored.logprobs


async def test_i6_every_server_samples_with_the_new_weights_and_says_so(tmp_path: Path) -> None:
    expected = TransformersEngine(model(1))
    async with servers(tmp_path, 2) as clients:
        publisher = DiskPublisher(clients, tmp_path)
        assert isinstance(publisher, WeightPublisher)
        update = await publisher.publish(model(1).named_parameters(), policy_version=7)
        for client in clients:
            np.testing.assert_allclose(await scores(client), (await expected.score(IDS)).logprobs, atol=1e-6)
            assert await client.policy_version() == 7
            (result,) = await client.generate([IDS], SamplingParams(max_tokens=3))
            assert [span.policy_version for span in result.sequences[0].version_spans] == [7]
    assert update.num_bytes > 10_000
    await expected.close()


async def test_a_version_that_a_server_has_is_not_loaded_again(tmp_path: Path) -> None:
    async with servers(tmp_path) as (client,):
        files = write_weights(tmp_path, model(1).named_parameters(), policy_version=1)
        assert await client.load_weights(files.folder, policy_version=1)
        assert not await client.load_weights(files.folder, policy_version=1)


async def test_other_weights_under_a_version_in_use_are_refused(tmp_path: Path) -> None:
    async with servers(tmp_path) as (client,):
        await DiskPublisher([client], tmp_path).publish(model(1).named_parameters(), policy_version=1)
        before = await scores(client)
        with pytest.raises(EngineError, match="version 1 is in use with other weights"):
            await DiskPublisher([client], tmp_path).publish(model(2).named_parameters(), policy_version=1)
        np.testing.assert_array_equal(await scores(client), before)


async def test_a_version_that_came_another_way_is_not_taken_for_the_one_that_came_before(tmp_path: Path) -> None:
    engine = scripted_engine("never")
    async with listening(make_app(engine, weights_dir=tmp_path)) as url, AsyncClient(url, max_retries=0) as client:
        publisher = DiskPublisher([client], tmp_path)
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        assert (await client.weights_state())["digest"] is not None
        await engine.update_weights(TensorSource([]), policy_version=2)  # as TRL's client does it, say
        assert (await client.weights_state())["digest"] is None
        with pytest.raises(EngineError, match="policy_version must rise above 2"):
            await publisher.publish(model(1).named_parameters(), policy_version=2)


@pytest.mark.parametrize("damage", ["cut", "names", "older"])
async def test_weights_that_cannot_be_used_leave_the_old_ones_serving(tmp_path: Path, damage: str) -> None:
    async with servers(tmp_path) as (client,):
        await DiskPublisher([client], tmp_path).publish(model(1).named_parameters(), policy_version=3)
        before = await scores(client)
        new = [(f"x.{name}" if damage == "names" else name, t) for name, t in model(2).named_parameters()]
        version = 2 if damage == "older" else 4
        files = write_weights(tmp_path, new, policy_version=version)
        if damage == "cut":
            path = files.folder / files.files[0].name
            path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(
            InvalidInputError, match={"cut": "must have .* bytes", "names": "x", "older": "rise"}[damage]
        ):
            await client.load_weights(files.folder, policy_version=version)
        np.testing.assert_array_equal(await scores(client), before)
        assert await client.policy_version() == 3
        assert await client.health()


async def test_a_server_that_is_gone_is_named_and_holds_the_others_up_in_nothing(tmp_path: Path) -> None:
    async with servers(tmp_path) as (client,), AsyncClient("http://127.0.0.1:9") as gone:
        publisher = DiskPublisher([client, gone], tmp_path)
        update = await publisher.publish(model(1).named_parameters(), policy_version=1)
        assert update.missed_by == ("http://127.0.0.1:9",)
        assert update.seconds < 1
        assert await client.policy_version() == 1


async def test_no_server_left_is_an_error_and_the_version_can_be_published_again(tmp_path: Path) -> None:
    async with AsyncClient("http://127.0.0.1:9", max_retries=0) as gone:
        with pytest.raises(ServerUnreachableError, match=r"not taken by 1 of 1 servers \(http://127.0.0.1:9"):
            await DiskPublisher([gone], tmp_path).publish(model(1).named_parameters(), policy_version=1)
    async with servers(tmp_path) as (client,):
        await DiskPublisher([client], tmp_path).publish(model(1).named_parameters(), policy_version=1)
        assert await client.policy_version() == 1


async def test_a_server_that_is_there_and_refuses_is_an_error_though_others_took_it(tmp_path: Path) -> None:
    async with servers(tmp_path / "here") as (refuses,), servers(tmp_path) as (client,):
        with pytest.raises(EngineError, match=r"not taken by 1 of 2 servers .*must lie in the server's --weights-dir"):
            await DiskPublisher([client, refuses], tmp_path).publish(model(1).named_parameters(), policy_version=1)


async def test_a_folder_elsewhere_and_a_server_without_one_are_refused(tmp_path: Path) -> None:
    files = write_weights(tmp_path / "elsewhere", model(1).named_parameters(), policy_version=1)
    async with servers(tmp_path / "here") as (client,):
        for folder in (files.folder, tmp_path / "here" / ".." / "elsewhere" / files.folder.name, tmp_path / "here"):
            with pytest.raises(InvalidInputError, match="must lie in the server's --weights-dir"):
                await client.load_weights(folder, policy_version=1)
    engine = TransformersEngine(model(0))
    async with listening(make_app(engine)) as url, AsyncClient(url) as client:
        with pytest.raises(InvalidInputError, match="start it with --weights-dir"):
            await client.load_weights(files.folder, policy_version=1)
    await engine.close()


async def test_loading_needs_the_admin_key(tmp_path: Path) -> None:
    async with servers(tmp_path, admin_key="secret", api_key="key") as (client,):
        files = write_weights(tmp_path, model(1).named_parameters(), policy_version=1)
        with pytest.raises(EngineError, match="admin key"):
            await client.load_weights(files.folder, policy_version=1)


async def test_requests_in_flight_go_on_with_the_new_weights(tmp_path: Path) -> None:
    async with servers(tmp_path) as (client,):
        chunks = client.stream(IDS, SamplingParams(max_tokens=400), n=2)
        await anext(chunks)
        await client.pause()  # so that it is not over before the weights are written
        await DiskPublisher([client], tmp_path).publish(model(1).named_parameters(), policy_version=1)
        await client.resume()
        assert {span.policy_version async for chunk in chunks for span in chunk.version_spans} == {0, 1}


async def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    async with servers(tmp_path) as (client,):
        publisher = DiskPublisher([client], tmp_path)
        for version in (1, 2, 3):
            await publisher.publish(model(version).named_parameters(), policy_version=version)
    assert list_versions(tmp_path) == [2, 3]


async def test_a_version_just_written_is_kept_though_a_run_before_had_higher_ones(tmp_path: Path) -> None:
    for version in (8, 9):
        write_weights(tmp_path, model(0).named_parameters(), policy_version=version)
    async with servers(tmp_path) as (client,):
        publisher = DiskPublisher([client], tmp_path)
        for version in (1, 2):
            await publisher.publish(model(version).named_parameters(), policy_version=version)
            assert version in list_versions(tmp_path)
    assert list_versions(tmp_path) == [1, 2]


async def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".version-00000007-{'a' * 32}"
    left.mkdir()
    (left / "00000.safetensors").write_bytes(b"half")
    async with servers(tmp_path) as (client,):
        await DiskPublisher([client], tmp_path).publish(model(1).named_parameters(), policy_version=1)
    assert not left.exists()
    assert list_versions(tmp_path) == [1]


async def test_a_server_that_hangs_has_failed_after_a_while(tmp_path: Path) -> None:
    class Hanging(AsyncClient):
        async def load_weights(self, *_: Any, **__: Any) -> bool:
            await asyncio.sleep(60)
            return True

    async with servers(tmp_path) as (client,), Hanging(client.base_url) as hanging:
        publisher = DiskPublisher([client, hanging], tmp_path, timeout_s=3.0)
        with pytest.raises(EngineError, match=r"1 of 2 servers .*it did not answer within 3 s \(timeout_s\)"):
            await publisher.publish(model(1).named_parameters(), policy_version=1)


async def test_a_server_that_no_trainer_knows_follows_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unbroken.server.weights._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("unbroken.server.weights._TRY_AGAIN_S", 0.05)
    expected = TransformersEngine(model(2))
    run = tmp_path / "run"

    def is_logged(words: str) -> bool:
        return words in caplog.text

    async with servers(run) as known:
        publisher = DiskPublisher(known, run)
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        async with servers(tmp_path / "other", versions_from=run) as (follower,):

            async def has_version(version: int) -> bool:
                return await follower.policy_version() == version

            assert await has_version(1)  # from its start on
            await publisher.publish(model(2).named_parameters(), policy_version=2)
            await wait_until(lambda: has_version(2))
            np.testing.assert_allclose(await scores(follower), (await expected.score(IDS)).logprobs, atol=1e-6)
            trainer = VersionStore(run)
            damaged = trainer.write(model(1).named_parameters(), policy_version=3)
            path = run / damaged.name / damaged.files[0].name
            path.write_bytes(path.read_bytes()[:-1])
            await wait_until(lambda: is_logged("must have"))
            await asyncio.sleep(0.3)
            assert caplog.text.count("is not loaded, and is tried again: weight file") == 1
            assert await has_version(2)
            trainer.write(model(1).named_parameters(), policy_version=3)  # written again
            await wait_until(lambda: has_version(3))
            assert (await follower.weights_state())["digest"] is not None
            trainer.write(model(2).named_parameters(), policy_version=3)  # of a run that began anew
            await wait_until(lambda: is_logged("version 3 is in use with other weights than those in"))
            trainer.write(model(2).named_parameters(), policy_version=1)
            await wait_until(lambda: is_logged("policy_version must rise above 3"))
            assert await has_version(3)
    await expected.close()


async def test_a_server_goes_on_following_after_an_error_that_nobody_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unbroken.server.weights._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("unbroken.server.weights._TRY_AGAIN_S", 0.05)
    engine = scripted_engine("a")
    update = engine.update_weights
    num_calls = 0

    async def fail_twice(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise ZeroDivisionError("how odd")
        return await update(*arguments, **options)

    engine.update_weights = fail_twice
    async with listening(make_app(engine, versions_from=tmp_path)):
        VersionStore(tmp_path).write([], policy_version=1)

        async def has_version() -> bool:
            return engine.policy_version == 1

        await wait_until(has_version)
    assert caplog.text.count("ZeroDivisionError: how odd") == 1


def _spoil(run: Path, kind: str) -> None:
    """Write version 2 as somebody else might."""
    named = [(name, weight.detach().clone()) for name, weight in model(2).named_parameters()]
    if kind == "some":
        named = named[:5]
    elif kind == "integers":
        named[3] = (named[3][0], named[3][1].int())
    elif kind in ("nan", "inf"):
        named[3][1].view(-1)[7] = float(kind)
    folder = run / VersionStore(run).write(named, policy_version=2).name
    manifest = folder / "manifest.json"
    if kind == "text" or kind == "fraction":
        value = {"text": '"2"', "fraction": "2.9"}[kind]
        manifest.write_text(manifest.read_text().replace('"policy_version": 2', f'"policy_version": {value}'))
    elif kind == "pipe":
        manifest.unlink()
        os.mkfifo(manifest)
    elif kind in ("pipe of weights", "device"):
        path = next(folder.glob("*.safetensors"))
        path.unlink()
        os.mkfifo(path) if kind == "pipe of weights" else path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("some", "a version of the weights must have all of them: 19 are missing, first"),
        ("integers", "must have floating-point numbers, got int32"),
        ("nan", "has numbers that are not finite"),
        ("inf", "has numbers that are not finite"),
        ("text", "policy_version must be an integer in .*, got '2'"),
        ("fraction", "policy_version must be an integer in .*, got 2.9"),
        ("pipe", "manifest.json must be a file of at most 16777216 bytes, got other"),
        ("pipe of weights", "00000.safetensors is no regular file"),
        ("device", "00000.safetensors is no regular file"),
    ],
)
async def test_a_version_that_is_not_one_leaves_the_old_one_serving_and_health_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    monkeypatch.setattr("unbroken.server.weights._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("unbroken.server.weights._TRY_AGAIN_S", 0.05)
    run = tmp_path / "run"
    VersionStore(run).write(model(1).named_parameters(), policy_version=1)
    engine = TransformersEngine(model(0))
    app = make_app(engine, versions_from=run)
    async with listening(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        before = (await engine.score(IDS)).logprobs
        _spoil(run, kind)

        async def says(**more: bool) -> bool:
            return (await client.get("/health")).json() == {"status": "ok", **more}

        await wait_until(lambda: says(weights_refused=True))
        assert re.search(message, caplog.text)
        assert engine.policy_version == 1
        np.testing.assert_array_equal((await engine.score(IDS)).logprobs, before)
        VersionStore(run).write(model(2).named_parameters(), policy_version=3)
        await wait_until(lambda: engine.policy_version == 3)
        await wait_until(says)
    await engine.close()


async def test_a_server_with_no_version_to_follow_serves_its_own_weights(tmp_path: Path) -> None:
    async with servers(tmp_path, versions_from=tmp_path / "later") as (client,):
        assert await client.policy_version() == 0


async def test_a_server_that_comes_gets_the_newest_version_and_all_that_follow(tmp_path: Path) -> None:
    async with servers(tmp_path, 2) as (first, second):
        publisher = DiskPublisher([first], tmp_path)
        await publisher.admit(first)  # is there already, and nothing has been published
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        assert await second.policy_version() == 0
        await publisher.admit(second)
        assert await second.policy_version() == 1
        np.testing.assert_array_equal(await scores(second), await scores(first))
        publisher.dismiss(first)
        assert (await publisher.publish(model(2).named_parameters(), policy_version=2)).missed_by == ()
        assert [await client.policy_version() for client in (first, second)] == [1, 2]
        publisher.dismiss(second)
        with pytest.raises(ServerUnreachableError, match="no server is there to take the weights"):
            await publisher.publish(model(3).named_parameters(), policy_version=3)
        await publisher.admit(first)  # that version is in the folder
        assert await first.policy_version() == 3


async def test_a_server_that_comes_while_a_version_is_written_has_that_version_in_the_end(tmp_path: Path) -> None:
    async with servers(tmp_path, 2) as (first, second):
        publisher = DiskPublisher([first], tmp_path)
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        publishing = publisher.publish(model(2).named_parameters(), policy_version=2)
        await asyncio.gather(publishing, publisher.admit(second))
        assert [await client.policy_version() for client in (first, second)] == [2, 2]


async def test_a_server_that_comes_with_weights_of_its_own_is_refused_and_holds_up_nothing(tmp_path: Path) -> None:
    async with servers(tmp_path) as (client,), servers(tmp_path / "elsewhere") as (other,):
        await DiskPublisher([other], tmp_path / "elsewhere").publish(model(3).named_parameters(), policy_version=5)
        publisher = DiskPublisher([client], tmp_path)
        with pytest.raises(EngineError, match="it has policy version 5, and no version has been published yet"):
            await publisher.admit(other)
        await publisher.publish(model(1).named_parameters(), policy_version=1)
        with pytest.raises(InvalidInputError, match="must lie in the server's --weights-dir"):
            await publisher.admit(other)
        assert (await publisher.publish(model(2).named_parameters(), policy_version=2)).missed_by == ()
