"""Versions in a store: what changed and what is made of it, and what a server does when a part is missing or broken."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.models import tiny_qwen3
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from support.waits import wait_until
from unbroken.client import AsyncClient
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, InvalidInputError, WeightsError
from unbroken.types import token_ids
from unbroken.weights import store as module
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.files import WeightFiles, write_weights
from unbroken.weights.store import StoredVersion, VersionStore

IDS = token_ids([1, 2, 3, 4, 5])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store in memory, each reader of which has its own place in a file, as in any store elsewhere."""
    files = fsspec.filesystem("memory")
    opens = type(files)._open

    def open_own(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        # fsspec gives all readers one file with one place: two servers that read at the same time got bytes twice.
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else opens(self, path, mode, **options)

    monkeypatch.setattr(type(files), "_open", open_own)
    yield "memory://run"
    files.store.clear()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> str:
    return memory if request.param == "memory" else f"file://{tmp_path}/store"


@pytest.fixture(autouse=True)
def several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version has several files."""
    monkeypatch.setattr(module, "write_weights", partial(write_weights, file_bytes=8000))


@pytest.fixture
def open_store() -> Iterator[Callable[[str], VersionStore]]:
    """Opens stores, and closes them at the end."""
    with ExitStack() as stack:

        def open_one(url: str) -> VersionStore:
            store = VersionStore(url)
            stack.callback(store.close)
            return store

        yield open_one


class Trainer:
    """Writes versions of two weights, of which few elements change."""

    def __init__(self, folder: Path, url: str, **options: Any) -> None:
        self.store = VersionStore(url, made_in=folder, **options)
        self.weights = {name: torch.randn(64, 65, dtype=torch.bfloat16) for name in ("a", "b")}
        self.version = 0

    def write(self, change: float = 0.01) -> StoredVersion:
        """Write a version in which this share of the elements changes; all of 1 are others."""
        for weight in self.weights.values():
            weight.mul_(1 + 0.02 * (torch.rand(weight.shape) < change))
            if change == 1:
                weight.copy_(torch.randn(weight.shape))
        self.version += 1
        return self.store.write(self.weights.items(), policy_version=self.version)

    def check(self, files: WeightFiles) -> None:
        files.verify()
        found = dict(files.tensors())
        assert found.keys() == self.weights.keys()
        for name, weight in found.items():
            assert torch.equal(weight, self.weights[name])


def test_each_version_is_what_was_written_and_most_are_small(
    url: str, open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1000)
    trainer, reader = Trainer(tmp_path, url, full_every=4), open_store(url)
    assert reader.find_newest() is None
    names: list[str] = []
    for number in range(1, 10):
        version = trainer.write()
        assert version.base == (None if number in (1, 5, 9) else names[-1])
        names.append(version.name)
        found, comes = reader.find_newest(), open_store(url)
        assert found == version == comes.find_newest()
        trainer.check(reader.fetch(version))
        trainer.check(comes.fetch(version))
        whole = reader.find_newest(is_whole=True)
        assert whole is not None
        assert whole.name == names[(number - 1) // 4 * 4]
    trainer.write()
    made = reader.fetch(trainer.write())
    assert [each.name for each in made.folder.parent.iterdir()] == [made.folder.name]
    reader.close()
    assert not made.folder.parent.exists()


def test_a_version_that_changed_too_much_or_has_another_size_is_whole(
    url: str, open_store: Any, tmp_path: Path
) -> None:
    trainer, reader = Trainer(tmp_path, url), open_store(url)
    assert [trainer.write(change).base is None for change in (0, 0.01, 1, 0.01)] == [True, False, True, False]
    trainer.weights["a"] = torch.randn(3, 3)
    assert trainer.write().base is None
    trainer.check(reader.fetch(trainer.store.find_newest()))  # type: ignore[arg-type]


@given(st.data())
def test_a_delta_gives_exactly_the_new_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    old = np.frombuffer(data.draw(st.binary(min_size=0, max_size=3000)), np.uint8)
    new = old.copy()
    for place in data.draw(st.lists(st.integers(0, max(len(old) - 1, 0)), max_size=50)):
        new[place : place + 1] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("delta")
    for name, content in (("old", old), ("new", new)):
        (folder / name).write_bytes(content.tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_BYTES", data.draw(st.sampled_from([2, 512, 2**24])))
        module._write_delta(folder / "old", folder / "new", folder / "delta")
        module._apply_delta(folder / "old", folder / "delta")
    assert (folder / "old").read_bytes() == new.tobytes()


def test_old_versions_are_removed_but_for_those_that_others_need(memory: str, open_store: Any, tmp_path: Path) -> None:
    earlier = Trainer(tmp_path / "earlier", memory)
    earlier.write()
    trainer, files = Trainer(tmp_path / "now", memory, full_every=3), fsspec.filesystem("memory")
    kept = []
    for _ in range(6):
        trainer.write()
        trainer.store.remove_old(2)
        kept.append(
            [int(name.split("-")[1]) for name in sorted(map(str, files.ls("/run", detail=False))) if "-" in name]
        )
        reader = open_store(memory)
        trainer.check(reader.fetch(reader.find_newest()))  # type: ignore[arg-type]
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6]]


def test_what_a_killed_server_left_is_removed_and_what_one_holds_that_lives_is_not(
    memory: str, open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    version = Trainer(tmp_path / "trainer", memory).write()
    folders = [tmp_path / "temporary" / name for name in ("unbroken-versions-new", "unbroken-versions-old", "other")]
    for folder in folders:
        (folder / "version").mkdir(parents=True)
    alive = open_store(memory).fetch(version).folder.parent
    for folder in (*folders[1:], alive):
        os.utime(folder, (0, 0))
    open_store(memory).fetch(version)
    assert [folder.exists() for folder in (*folders, alive)] == [True, False, True, True]


def test_an_outage_costs_a_server_neither_its_base_nor_its_disk(
    memory: str, open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, reader = Trainer(tmp_path, memory), open_store(memory)
    base = reader.fetch(trainer.write())
    newest = trainer.write()
    with monkeypatch.context() as outage:

        def refuse(*_: Any, **__: Any) -> None:
            raise ConnectionResetError

        outage.setattr(type(fsspec.filesystem("memory")), "get_file", refuse)
        with pytest.raises(WeightsError, match="ConnectionResetError"):
            reader.fetch(newest)
    made = reader.fetch(newest)
    trainer.check(made)
    assert not base.folder.exists()
    assert [path.name for path in made.folder.parent.iterdir()] == [newest.name]


@pytest.mark.parametrize("damage", ["manifest", "delta", "cut", "result"])
def test_a_broken_link_is_an_error_that_leaves_the_version_before(
    memory: str, open_store: Any, tmp_path: Path, damage: str
) -> None:
    trainer, reader, files = Trainer(tmp_path, memory), open_store(memory), fsspec.filesystem("memory")
    trainer.write()
    link = trainer.write()
    newest = trainer.write()
    name = link.files[0].name
    match damage:
        case "manifest":
            files.rm(f"/run/{link.name}/manifest.json")
        case "delta":
            files.rm(f"/run/{link.name}/{name}.delta")
        case "cut":
            files.pipe_file(f"/run/{link.name}/{name}.delta", files.cat_file(f"/run/{link.name}/{name}.delta")[:-9])
        case "result":
            other = files.cat_file(f"/run/{newest.name}/{name}.delta")
            files.pipe_file(f"/run/{link.name}/{name}.delta", other)
    with pytest.raises(WeightsError, match="memory://run"):
        reader.fetch(newest)
    whole = reader.find_newest(is_whole=True)
    assert whole is not None
    reader.fetch(whole).verify()
    trainer.store.write(trainer.weights.items(), policy_version=3)  # again, and so whole
    trainer.check(reader.fetch(reader.find_newest()))  # type: ignore[arg-type]


def test_a_file_that_was_damaged_here_is_read_again(memory: str, open_store: Any, tmp_path: Path) -> None:
    trainer, reader = Trainer(tmp_path, memory), open_store(memory)
    made = reader.fetch(trainer.write())
    path = made.folder / made.files[0].name
    path.write_bytes(path.read_bytes()[:-2] + b"xx")
    trainer.check(reader.fetch(trainer.write()))


@pytest.mark.parametrize("name", ["../x", "version-1", "version-00000001-0123456789ab/../x"])
def test_a_name_that_is_no_version_is_refused(memory: str, name: str) -> None:
    with pytest.raises(WeightsError, match="in memory://run: a version must be version-NUMBER-DIGEST"):
        VersionStore(memory).read(name)


def test_a_version_that_is_its_own_base_is_refused(memory: str, tmp_path: Path) -> None:
    trainer, files = Trainer(tmp_path, memory), fsspec.filesystem("memory")
    version = trainer.write()
    path = f"/run/{version.name}/manifest.json"
    files.pipe_file(path, json.dumps({**json.loads(files.cat_file(path)), "base": version.name}).encode())
    with pytest.raises(WeightsError, match="is its own base"):
        VersionStore(memory).fetch(VersionStore(memory).read(version.name))


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_store_that_needs_another_package_says_which() -> None:
    with pytest.raises(InvalidInputError, match=r"the store s3://bucket/run cannot be used: .*s3fs"):
        VersionStore("s3://bucket/run")
    with pytest.raises(InvalidInputError, match=r"the store nosuch://a cannot be used"):
        VersionStore("nosuch://a")


@pytest.mark.parametrize("place", ["w", "a::b", "a%20b"])
def test_a_path_is_a_folder_whatever_is_in_it_and_what_is_in_a_folder_is_read_where_it_lies(
    tmp_path: Path, open_store: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = VersionStore(Path(place))
    assert not writer.has_deltas
    for version in (1, 2):
        writer.write({"a": torch.ones(3)}.items(), policy_version=version)
    for reader in (open_store(place), open_store(tmp_path / place), open_store(str(tmp_path / place))):
        newest = reader.find_newest()
        assert (newest.policy_version, newest.base) == (2, None)
        assert reader.fetch(newest).folder == tmp_path / place / newest.name


def test_a_writer_to_a_place_that_is_no_folder_needs_one(memory: str) -> None:
    with pytest.raises(InvalidInputError, match=r"a writer to memory://run needs a folder .*\(made_in\)"):
        VersionStore(memory).write([], policy_version=1)


def test_a_folder_that_is_full_keeps_the_newest_version(
    tmp_path: Path, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = VersionStore(tmp_path)
    first = writer.write({"a": torch.ones(3)}.items(), policy_version=1)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        with pytest.raises(WeightsError, match="No space left"):
            writer.write({"a": torch.zeros(3)}.items(), policy_version=2)
    assert open_store(tmp_path).find_newest() == first


def model(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    return tiny_qwen3(vocab_size=len(server_tokenizer()), seed=seed).to(dtype)


def made_in(folder: Path) -> list[str]:
    return [path.name.split("-")[1] for path in folder.iterdir()]


@asynccontextmanager
async def servers(url: str, number: int, dtype: torch.dtype = torch.float32) -> AsyncIterator[list[AsyncClient]]:
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(number):
            engine = TransformersEngine(model(0, dtype))
            stack.push_async_callback(engine.close)
            address = await stack.enter_async_context(listening(make_app(engine, versions_from=url)))
            clients.append(await stack.enter_async_context(AsyncClient(address, max_retries=0)))
        yield clients


async def test_servers_are_told_of_versions_in_a_store_in_their_dtype_and_others_find_them(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.server.weights._LOOK_EVERY_S", 0.05)
    trained = model(1)  # in float32, as a trainer has it
    store = VersionStore(memory, made_in=tmp_path)
    async with servers(memory, 2, torch.bfloat16) as (known, follower):
        publisher = DiskPublisher([known], store)
        for version in range(1, 4):
            update = await publisher.publish(trained.named_parameters(), policy_version=version)
            assert update.missed_by == ()
            assert await known.policy_version() == version
            expected = TransformersEngine(copy.deepcopy(trained).bfloat16())
            for client in (known, follower):

                async def has_version(client: AsyncClient = client, version: int = version) -> bool:
                    return await client.policy_version() == version

                await wait_until(has_version)
                (scored,) = await client.score([IDS])
                np.testing.assert_array_equal(scored.logprobs, (await expected.score(IDS)).logprobs)
            await expected.close()
            with torch.no_grad():
                for weight in trained.parameters():
                    weight.mul_(1 + 0.05 * (torch.rand(weight.shape) < 0.02))
        newest = store.find_newest()
        assert newest is not None
        assert newest.base is not None
        assert update.num_bytes == pytest.approx(2 * sum(p.numel() for p in trained.parameters()), rel=0.05)
        await publisher.publish(trained.named_parameters(), policy_version=4)
        assert made_in(tmp_path) == ["00000004"]

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError("no deletes")

        monkeypatch.setattr(type(fsspec.filesystem("memory")), "rm", refuse)
        update = await publisher.publish(trained.named_parameters(), policy_version=5)
        assert update.missed_by == ()


async def test_a_server_that_cannot_make_the_newest_version_takes_the_newest_whole_one(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unbroken.server.weights._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("unbroken.server.weights._TRY_AGAIN_S", 0.05)
    trainer, files = Trainer(tmp_path, memory, full_every=3), fsspec.filesystem("memory")
    engine = scripted_engine("a")
    for _ in range(5):
        last = trainer.write()
    files.rm(f"/run/{last.name}/{last.files[0].name}.delta")
    async with listening(make_app(engine, versions_from=memory)):
        assert engine.policy_version == 4
        await asyncio.sleep(0.3)
        assert caplog.text.count("is not loaded, and is tried again: the versions in memory://run cannot be read") == 1
        trainer.write()
        await asyncio.sleep(0.3)
        assert engine.policy_version == 4  # its link is broken
        trainer.write()
        await wait_until(lambda: engine.policy_version == 7)


async def test_a_server_takes_no_folder_outside_its_store(memory: str, tmp_path: Path) -> None:
    async with servers(memory, 1) as (client,):
        for folder in ("memory://other/version-00000001-0123456789ab", "memory://run/../x", str(tmp_path)):
            with pytest.raises((EngineError, InvalidInputError)):
                await client.load_weights(folder, policy_version=1)
        assert await client.policy_version() == 0
