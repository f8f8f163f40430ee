"""What grows while servers work for minutes: memory, open files, threads and the store, every ten seconds.

    OMP_NUM_THREADS=1 python bench/soak.py --seconds 600 --output runs/soak
    OMP_NUM_THREADS=1 python bench/soak.py --seconds 600 --server sessions --trace 1      # with lines that allocated it

Two servers with the embedded engine and a tiny model, one after the other or by `--server`: `sessions` gets requests of
ragged lengths, some of which are refused and some of whose readers leave, and sessions of several turns, half of which
are deleted; `tinker` gets steps of an adapter, new samplers and their samples. OUTPUT/SERVER.jsonl has a line for each
ten seconds. A thread of the server writes what it holds every minute to OUTPUT/SERVER-objects.jsonl: objects by type,
bytes of tensors, what malloc has in use, and with `--trace` the lines whose allocations have grown. At the end it
prints the growth a minute over the second half, and of which types there are more.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from server import NAME, answers, free_port, save_model
from unbroken.client import AsyncClient
from unbroken.errors import UnbrokenError
from unbroken.server.http import idempotency
from unbroken.types import SamplingParams

SERVERS = ("sessions", "tinker")
NUM_CLIENTS = 6
VOCABULARY = 2000
NUM_SHOWN = 12
EVERY_S = 10.0
KEPT_S = 60.0
"""How long the server keeps answers for retries: ten minutes otherwise, in which it grows up to what it then keeps."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def count_held(previous: tracemalloc.Snapshot | None, *, is_traced: bool) -> tuple[dict[str, Any], Any]:
    """What this process holds, after a collection."""
    import torch

    gc.collect()
    interval_s = sys.getswitchinterval()
    # Another thread may be about to fill a tuple of these, which fails while the list holds it too: it must not run.
    sys.setswitchinterval(60)
    objects = gc.get_objects()
    by_type, num_objects = Counter(map(type, objects)), len(objects)
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    del objects
    sys.setswitchinterval(interval_s)
    types = Counter({f"{kind.__module__}.{kind.__qualname__}": number for kind, number in by_type.items()})
    storages = [tensor.untyped_storage() for tensor in tensors]
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    held: dict[str, Any] = {
        "time": time.time(),
        "rss": psutil.Process().memory_info().rss,
        "malloc_used": info.uordblks + info.hblkhd,
        "malloc_free": info.fordblks,
        "tensors": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
        "num_objects": num_objects,
        "types": types.most_common(400),
    }
    snapshot = tracemalloc.take_snapshot() if is_traced else None
    if snapshot is not None and previous is not None:
        held["lines"] = [str(line) for line in snapshot.compare_to(previous, "lineno")[:25]]
    return held, snapshot


def watch(path: Path, *, is_traced: bool, every_s: float) -> None:
    """Write what this process holds, every minute: a thread of the server."""
    previous = None
    while True:
        time.sleep(every_s)
        held, snapshot = count_held(previous, is_traced=is_traced)
        previous = previous or snapshot
        with path.open("a") as file:
            file.write(json.dumps(held) + "\n")


def serve(objects: Path, *, is_traced: bool, every_s: float, words: Sequence[str]) -> int:
    """The server, in a process of its own."""
    from unbroken.cli import main as unbroken

    idempotency._KEPT_S = KEPT_S
    if is_traced:
        tracemalloc.start(1)
    threading.Thread(
        target=watch, args=(objects,), kwargs={"is_traced": is_traced, "every_s": every_s}, daemon=True
    ).start()
    return unbroken(["serve", *words])


@contextmanager
def run_server(
    name: str, folder: Path, store: Path, arguments: argparse.Namespace
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server, and end it with the block."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    kept = {
        "sessions": ["--sessions", str(store), "--no-control-key"],
        "tinker": ["--tinker", "--tinker-store", str(store)],
    }[name]
    words = [
        "--model",
        str(folder),
        "--served-model-name",
        NAME,
        "--engine",
        "transformers",
        "--port",
        str(port),
        *kept,
    ]
    own = [str(arguments.output / f"{name}-objects.jsonl"), str(arguments.trace), str(arguments.objects_s)]
    with (arguments.output / f"{name}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, __file__, "--child", *own, *words], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 300
        while not answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server does not serve: see {arguments.output / f'{name}.log'}")
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


async def use_sessions(url: str, seconds: float, count: Counter[str]) -> None:
    """Ragged requests and sessions, from several clients at once."""
    until = time.monotonic() + seconds
    async with AsyncClient(url) as client, httpx.AsyncClient(timeout=120) as http, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(use_once_again(client, http, random.Random(number), until, count))


async def use_once_again(
    client: AsyncClient, http: httpx.AsyncClient, rng: random.Random, until: float, count: Counter[str]
) -> None:
    """One client."""
    kinds = {"sample": 5, "session": 3, "refused": 1, "left": 1}
    while time.monotonic() < until:
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        count[kind] += 1
        prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 300))] for _ in range(rng.randint(1, 4))]
        params = SamplingParams(max_tokens=rng.randint(1, 40))
        if kind == "sample":
            await client.generate(prompts, params, n=rng.randint(1, 3))
        elif kind == "session":
            await play_session(client, http, rng)
        elif kind == "refused":
            try:
                await client.generate([[10**6]], params)
            except UnbrokenError:
                continue
            raise AssertionError("an id outside of the vocabulary must be refused")
        else:
            try:
                async with asyncio.timeout(rng.uniform(0.01, 0.3)):
                    await client.generate(prompts, SamplingParams(max_tokens=300))
            except TimeoutError:
                pass


async def play_session(client: AsyncClient, http: httpx.AsyncClient, rng: random.Random) -> None:
    """A session of a few turns; every second one is deleted."""
    created = await client.sessions.create()
    messages = [{"role": "user", "content": "x" * rng.randint(1, 200)}]
    for _ in range(rng.randint(1, 4)):
        answer = await http.post(
            f"{created['openai_base_url']}/chat/completions",
            json={"model": created["model"], "messages": messages, "max_tokens": rng.randint(1, 30)},
            headers={"authorization": f"Bearer {created['api_key']}"},
        )
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "y" * rng.randint(1, 50)}]
    await client.sessions.finish(created["session_id"], {"reward": 1.0})
    await client.sessions.samples(created["session_id"])
    if rng.random() < 0.5:
        await client.sessions.delete(created["session_id"])


def use_tinker(url: str, seconds: float, count: Counter[str]) -> None:
    """A training loop by the SDK: samples, a step, and weights for a new sampler; a new model every 20 steps."""
    import tinker
    from tinker import types

    rng, until = random.Random(0), time.monotonic() + seconds
    service: Any = None
    client: Any = None
    while time.monotonic() < until:
        if count["step"] % 20 == 0:
            if service is not None:
                service.close("success").result()
            service = tinker.ServiceClient(base_url=url, api_key="tml-soak")
            client = service.create_lora_training_client(base_model=NAME, rank=8).result()
            count["model"] += 1
        sampler = client.save_weights_and_get_sampling_client().result()
        calls = []
        for _ in range(4):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 150))]
            params = types.SamplingParams(max_tokens=rng.randint(1, 40), stop=[])
            calls.append((prompt, sampler.sample(types.ModelInput.from_ints(prompt), 2, params)))
        data = []
        for prompt, call in calls:
            for sequence in call.result().sequences:
                ids, given = [*prompt, *sequence.tokens], len(prompt) - 1
                inputs: dict[str, Any] = {
                    "target_tokens": ids[1:],
                    "logprobs": [0.0] * given + list(sequence.logprobs),
                    "advantages": [0.0] * given + [rng.uniform(-1, 1)] * len(sequence.tokens),
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        passes = client.forward_backward(data, "ppo")
        step = client.optim_step(types.AdamParams(learning_rate=1e-5))
        passes.result(), step.result()
        count["step"] += 1
        count["sample"] += len(data)


def measure(process: psutil.Process, store: Path, count: Counter[str], started: float) -> dict[str, Any]:
    """The numbers of one moment."""
    sizes = []
    for path in store.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:  # removed meanwhile
            continue
    return {
        "seconds": round(time.monotonic() - started, 1),
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "connections": len(process.net_connections()),
        "cpu_s": round(sum(process.cpu_times()[:2]), 1),
        "store": sum(sizes),
        "count": dict(count),
    }


def soak(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Use a server for the given time, and return the lines."""
    count: Counter[str] = Counter()
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model, store = Path(folder) / "model", Path(folder) / "store"
        save_model(model, "tiny", "float32")
        with run_server(name, model, store, arguments) as (url, process):
            started, is_done = time.monotonic(), threading.Event()

            def note() -> None:
                with (arguments.output / f"{name}.jsonl").open("w") as file:
                    while not is_done.wait(EVERY_S):
                        lines.append(measure(process, store, count, started))
                        file.write(json.dumps(lines[-1]) + "\n")
                        file.flush()

            noting = threading.Thread(target=note)
            noting.start()
            try:
                if name == "sessions":
                    asyncio.run(use_sessions(url, arguments.seconds, count))
                else:
                    use_tinker(url, arguments.seconds, count)
                time.sleep(2 * EVERY_S)  # what is left when nobody works
            finally:
                is_done.set()
                noting.join()
    return lines


def report(name: str, lines: Sequence[dict[str, Any]], objects: Path) -> None:
    """Print the growth over the second half, and of which types there are more."""
    half = [line for line in lines if line["seconds"] >= lines[-1]["seconds"] / 2]
    print(f"\n{name}: {lines[-1]['seconds']:.0f} s, {lines[-1]['count']}, {lines[-1]['cpu_s']} CPU s")
    for line in lines[:: max(1, len(lines) // 10)]:
        print(
            f"  {line['seconds']:>6.0f} s  memory {line['rss'] / 1e6:7.1f} MB  store {line['store'] / 1e6:7.1f} MB  "
            f"files {line['files']}  threads {line['threads']}"
        )
    minutes = np.array([line["seconds"] for line in half]) / 60
    for field in ("rss", "store"):
        slope = np.polyfit(minutes, [line[field] / 1e6 for line in half], 1)[0]
        print(f"  second half: {field} {slope:+.2f} MB a minute")
    held = [json.loads(line) for line in objects.read_text().splitlines()] if objects.exists() else []
    if len(held) < 3:
        return
    first, last = held[len(held) // 2], held[-1]
    minutes_between = (last["time"] - first["time"]) / 60 or 1
    for field in ("rss", "malloc_used", "malloc_free", "tensors"):
        slope = (last[field] - first[field]) / 1e6 / minutes_between
        print(f"  {field} {slope:+.2f} MB a minute, now {last[field] / 1e6:.1f}")
    more = Counter(dict(last["types"]))
    more.subtract(dict(first["types"]))
    print(
        "  more objects a minute:",
        {kind: round(n / minutes_between, 1) for kind, n in more.most_common(NUM_SHOWN) if n > 0},
    )
    for line in last.get("lines", [])[:NUM_SHOWN]:
        print("  ", line)


def main() -> int:
    """Soak one server after the other."""
    if sys.argv[1:2] == ["--child"]:
        path, is_traced, every_s, *words = sys.argv[2:]
        return serve(Path(path), is_traced=bool(int(is_traced)), every_s=float(every_s), words=words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=SERVERS, help="only this one")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--objects-s", type=float, default=60.0, help="from one count of objects to the next")
    parser.add_argument("--trace", type=int, choices=(0, 1), default=0, help="lines that allocate, at twice the time")
    parser.add_argument("--output", type=Path, default=Path("runs/soak"))
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in SERVERS if arguments.server is None else (arguments.server,):
        objects = arguments.output / f"{name}-objects.jsonl"
        objects.unlink(missing_ok=True)
        report(name, soak(name, arguments), objects)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
