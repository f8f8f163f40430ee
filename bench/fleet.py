"""Seconds until N servers have a new version from a folder: asked by the trainer, or following the folder.

python bench/fleet.py --servers 1 8 32 --megabytes 1 100

All servers are in one process, with engines that load nothing: what is timed is the requests, and each server's SHA-256
of all files.
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

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.servers import listening, make_app, scripted_engine
from unbroken.client import AsyncClient
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.files import write_weights


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


def main() -> None:
    """Print a line for each number of servers and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--versions", type=int, default=7)
    options = parser.parse_args()
    for megabytes in options.megabytes:
        for number in options.servers:
            with tempfile.TemporaryDirectory() as folder:
                asked, found = asyncio.run(time_versions(Path(folder), number, megabytes, options.versions))
            print(f"{megabytes:4d} MB  {number:3d} servers  asked {asked:.3f} s  following {found:.3f} s", flush=True)


if __name__ == "__main__":
    main()
