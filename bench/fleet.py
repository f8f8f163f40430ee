"""Seconds until N servers have a new version from a folder: asked by the trainer, or following the folder.

python bench/fleet.py --servers 1 8 32 --megabytes 1 100

All servers are in one process, with engines that load nothing: what is timed is the requests, and each server's SHA-256
of all files.

    python bench/fleet.py --pause transformers --hidden-size 640 --layers 12

How long running streams wait while their server, a process of its own, takes a version in bfloat16 from a folder and
from a store, where most elements stay as they were: the weights move by the learning rate, in float32.

    python bench/fleet.py --watch --servers 8 32
    python bench/fleet.py --simulate --servers 1 8 32 100

What it costs to follow a list of servers, and, on a virtual clock, when all of N servers have a version of 61 GB (30 B
in bfloat16), by way and bandwidth. Links share what they have among those who use them; a server writes whole files to
its disk, and makes them of deltas with 8 cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.models import random_qwen3
from support.served import save_tiny_model, served
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from unbroken.client import AsyncClient
from unbroken.engines.http import HttpEngine
from unbroken.threads import LoopThread
from unbroken.types import SamplingParams
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.files import write_weights
from unbroken.weights.store import VersionStore
from virtual_clock import run_on_virtual_clock


async def time_versions(folder: Path, num_servers: int, megabytes: int, num_versions: int) -> tuple[float, float]:
    """The median seconds of a version that all are asked to load, and of one that they find."""
    weights = [("weight", torch.zeros(megabytes * 2**18))]
    asked, found = [], []
    async with AsyncExitStack() as stack:

        async def start(**config: Path) -> list[AsyncClient]:
            urls = [
                await stack.enter_async_context(listening(make_app(scripted_engine("a"), **config)))
                for _ in range(num_servers)
            ]
            return [await stack.enter_async_context(AsyncClient(url)) for url in urls]

        known, followers = await start(weights_dir=folder / "asked"), await start(versions_from=folder / "found")
        publisher = DiskPublisher(known, folder / "asked")
        for version in range(1, num_versions + 1):
            asked.append((await publisher.publish(weights, policy_version=version)).seconds)
            started = time.perf_counter()
            await asyncio.to_thread(write_weights, folder / "found", weights, policy_version=version)
            for client in followers:
                while await client.policy_version() < version:  # noqa: ASYNC110  # of another process, in real life
                    await asyncio.sleep(0.02)
            found.append(time.perf_counter() - started)
    return statistics.median(asked), statistics.median(found)


class Listed:
    """A list of servers that does not change."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def addresses(self) -> tuple[str, ...]:
        return self._urls


async def time_watching(num_servers: int) -> None:
    """Print the CPU time of a process that follows servers, and theirs; they are in a thread of their own."""
    thread, stack = LoopThread(), AsyncExitStack()

    async def serve() -> list[str]:
        return [await stack.enter_async_context(listening(make_app(scripted_engine("a")))) for _ in range(num_servers)]

    async def read_clock() -> float:
        return time.thread_time()

    engine = await HttpEngine.connect(Listed(await thread.call(serve())))
    await asyncio.sleep(2)
    began_s, own_s, their_s = time.monotonic(), time.thread_time(), await thread.call(read_clock())
    await asyncio.sleep(10)
    seconds = time.monotonic() - began_s
    own_s, their_s = time.thread_time() - own_s, await thread.call(read_clock()) - their_s
    num_checks = num_servers * seconds / 0.5
    print(
        f"{num_servers} servers: to follow them takes {own_s / seconds:.1%} of a core, {1e3 * own_s / num_checks:.2f} "
        f"ms a check; a server {1e3 * their_s / num_checks:.2f} ms",
        flush=True,
    )
    await engine.close()
    await thread.call(stack.aclose())
    thread.close()


class Link:
    """So many bytes a second, for all who use it together."""

    def __init__(self, gb_per_s: float) -> None:
        self._gb_per_s = gb_per_s
        self._is_free = asyncio.Lock()

    async def carry(self, gigabytes: float) -> None:
        async with self._is_free:
            await asyncio.sleep(gigabytes / self._gb_per_s)


CHUNK_GB = 0.25


async def copy(gigabytes: float, *links: Link) -> None:
    """Move bytes over links one after the other, as a stream does: all carry at once."""
    while gigabytes > 0:
        await asyncio.gather(*(link.carry(min(CHUNK_GB, gigabytes)) for link in links))
        gigabytes -= CHUNK_GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Sizes, in GB, and GB a second."""

    whole: float = 61.0
    share: float = 1.0
    """Of the whole bytes, what a version has in the store."""
    store: float = 12.5
    trainer_link: float = 12.5
    server_link: float = 3.1
    disk: float = 2.0
    make_delta: float = 8 * 0.21
    apply_delta: float = 8 * 0.7
    verify: float = 8 * 1.7
    load: float = 10.0
    look_every_s: float = 1.0


async def simulate(way: str, num_servers: int, fleet: Fleet) -> tuple[float, float]:
    """Seconds until the first and the last server has a version, from the end of the trainer's step."""
    store, trainer = Link(fleet.store), Link(fleet.trainer_link)
    links = [Link(fleet.server_link) for _ in range(num_servers)]
    size, loop = fleet.whole * fleet.share, asyncio.get_running_loop()

    async def take(server: int) -> float:
        if way == "store":  # it finds the version when it looks next
            await asyncio.sleep(fleet.look_every_s * (server + 0.5) / num_servers)
            disk = Link(fleet.disk)
            await copy(size, store, links[server], *([disk] if fleet.share == 1 else []))
            if fleet.share < 1:
                await copy(fleet.whole, disk, Link(fleet.apply_delta))
        elif way == "broadcast":
            await copy(size, links[server])
        else:
            await copy(size, trainer, links[server])
        await asyncio.sleep(fleet.whole / fleet.verify + fleet.whole / fleet.load)
        return loop.time()

    if way == "store":
        await copy(fleet.whole, Link(fleet.disk))
        if fleet.share < 1:
            await asyncio.sleep(fleet.whole / fleet.make_delta)
        await copy(size, store, trainer)
    if way == "in turn":
        times = [await take(server) for server in range(num_servers)]
    elif way == "tree":  # each that has it gives it to another one
        times, waiting, having = [], list(range(num_servers)), [trainer]
        while waiting:
            now, waiting = waiting[: len(having)], waiting[len(having) :]
            await asyncio.gather(*(copy(size, each, links[k]) for each, k in zip(having, now, strict=False)))
            having += [links[k] for k in now]
            times.append(loop.time() + fleet.whole / fleet.verify + fleet.whole / fleet.load)
    else:
        times = list(await asyncio.gather(*map(take, range(num_servers))))
    return min(times), max(times)


def simulate_all(numbers: Sequence[int]) -> None:
    """Print when N servers have a version."""
    cases = [
        ("trainer to one after another", "in turn", Fleet()),
        ("trainer to all at once", "at once", Fleet()),
        ("tree: who has it gives it on", "tree", Fleet()),
        ("broadcast", "broadcast", Fleet()),
        *(
            (f"store of {gb:g} GB/s, {name}", "store", Fleet(store=gb, share=share))
            for gb in (1.25, 5, 12.5, 50)
            for name, share in (("whole", 1.0), ("delta 1/17", 1 / 17), ("delta 1/96", 1 / 96))
        ),
    ]
    print("first and last of N servers, s".ljust(36) + "".join(f"{number:>16}" for number in numbers))
    for name, way, fleet in cases:
        found = [run_on_virtual_clock(simulate(way, number, fleet)) for number in numbers]
        print(name.ljust(36) + "".join(f"{f'{first:.0f} {last:.0f}':>16}" for first, last in found), flush=True)


class Streams:
    """Streams of one server that go on and on, and the times between their chunks."""

    def __init__(self, client: AsyncClient, number: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        """Each chunk's time, and the seconds since the stream's one before."""
        self._tasks = [asyncio.create_task(self._stream(client, k)) for k in range(number)]

    async def _stream(self, client: AsyncClient, seed: int) -> None:
        for turn in range(10_000):
            last_s = None
            params = SamplingParams(max_tokens=400, seed=1000 * turn + seed)
            async for _ in client.stream([1, 2, 3, 4 + seed], params):
                now_s = time.perf_counter()
                if last_s is not None:
                    self.gaps.append((now_s, now_s - last_s))
                last_s = now_s

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """The gaps, in ms, of the chunks that came in this time, and of the first one after it for each stream."""
        return [gap * 1e3 for time_s, gap in self.gaps if time_s >= begin_s and time_s - gap <= end_s]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def time_pause(url: str, publisher: DiskPublisher, client: AsyncClient, model: Any, options: Any) -> None:
    """Print the times between tokens before updates and while they are made."""
    streams = Streams(client, options.streams)
    await asyncio.sleep(3)
    for rate in options.learning_rates:
        before, during, seconds, sizes = [], [], [], []
        for _ in range(options.versions):
            begin_s = time.perf_counter()
            await asyncio.sleep(2)
            end_s = time.perf_counter()
            before += streams.between(begin_s, end_s)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight).sign_(), alpha=rate)
            begin_s = time.perf_counter()
            version = await client.policy_version() + 1
            update = await publisher.publish(model.named_parameters(), policy_version=version)
            end_s = time.perf_counter()
            await asyncio.sleep(0.5)
            during.append(max(streams.between(begin_s, end_s)))
            seconds.append(end_s - begin_s)
            sizes.append(update.num_bytes)
        print(
            f"{url}  learning rate {rate:g}  {statistics.median(sizes) / 1e6:.0f} MB  publish "
            f"{statistics.median(seconds):.2f} s  between tokens {statistics.median(before):.0f} ms (longest "
            f"{max(before):.0f})  longest in an update {statistics.median(during):.0f} ms ({max(during):.0f})",
            flush=True,
        )
    streams.close()


async def compare_pauses(folder: Path, options: argparse.Namespace) -> None:
    """Measure a server that gets versions from a folder, and one that gets them from a store."""
    sizes = {"hidden_size": options.hidden_size, "num_hidden_layers": options.layers, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 3 * options.hidden_size}
    sizes |= {"initializer_range": 0.02, "max_position_embeddings": 1024}
    path = save_tiny_model(folder / "model", **sizes)
    url = f"file://{folder}/store"
    model = random_qwen3(vocab_size=len(server_tokenizer()), **sizes)
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} M parameters")
    store = VersionStore(url)
    for words, place in (("--weights-dir", str(folder / "weights")), ("--versions-from", url)):
        with served(path, "--dtype", "bfloat16", words, place, engine=options.pause, as_command=True) as server:
            async with AsyncClient(server.url) as client:
                own = store if place == url else None
                publisher = DiskPublisher([client], folder / ("weights" if own is None else "own"), store=own)
                await time_pause(words, publisher, client, model, options)
    store.close()


def main() -> None:
    """Print a line for each number of servers and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--versions", type=int, default=7)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--pause", choices=["transformers", "vllm"])
    parser.add_argument("--hidden-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    options = parser.parse_args()
    if options.simulate:
        simulate_all(options.servers)
        return
    if options.watch:
        for number in options.servers:
            asyncio.run(time_watching(number))
        return
    if options.pause:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(compare_pauses(Path(folder), options))
        return
    for megabytes in options.megabytes:
        for number in options.servers:
            with tempfile.TemporaryDirectory() as folder:
                asked, found = asyncio.run(time_versions(Path(folder), number, megabytes, options.versions))
            print(f"{megabytes:4d} MB  {number:3d} servers  asked {asked:.3f} s  following {found:.3f} s", flush=True)


if __name__ == "__main__":
    main()
