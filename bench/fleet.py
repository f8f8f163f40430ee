"""Seconds until N servers have a new version from a folder: asked by the trainer, or following the folder.

python bench/fleet.py --servers 1 8 32 --megabytes 1 100

All servers are in one process, with engines that load nothing: what is timed is the requests, and each server's SHA-256
of all files.

    python bench/fleet.py --pause transformers --hidden-size 640 --layers 12

How long running streams wait while their server, a process of its own, takes a version in bfloat16 from a folder and
from a store, where most elements stay as they were: the weights move by the learning rate, in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.models import random_qwen3
from support.served import save_tiny_model, served
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from unbroken.client import AsyncClient
from unbroken.types import SamplingParams
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.files import write_weights
from unbroken.weights.store import VersionStore


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
    parser.add_argument("--pause", choices=["transformers", "vllm"])
    parser.add_argument("--hidden-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    options = parser.parse_args()
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
