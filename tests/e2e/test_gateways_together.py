"""Agents' sessions over three gateways in processes of their own, one of which is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.effort import EFFORT
from support.forks import ForkedPython
from support.gateways import CHAT
from support.postgres import run_postgres
from support.processes import free_port
from support.servers import encode, listening, make_app, scripted_engine, server_tokenizer
from unbroken.types import TokenIds, token_ids

pytestmark = pytest.mark.e2e

NUM_GATEWAYS, NUM_WORKERS, NUM_SESSIONS, MEAN_TURNS = 4, 2, 40 * EFFORT, 6
KEY = {"Authorization": "Bearer control"}


def answer(prompt_ids: TokenIds) -> list[int]:
    """A reply that no other prompt gets."""
    return encode(f"reply to {len(prompt_ids)} ids, {int(prompt_ids.sum())}<|im_end|>")


@asynccontextmanager
async def started(
    folder: Path, store: str, upstream: str, tokenizer: Path, *more: str, port: int | str
) -> AsyncIterator[ForkedPython]:
    make_folder(folder)
    process = ForkedPython(
        "unbroken", "gateway", "--upstream", upstream, "--tokenizer", tokenizer, "--store", store, "--api-key",
        "control", "--port", str(port), *more, output=folder / "output",
        errors=folder / "errors",
    )  # fmt: skip
    try:
        async with asyncio.timeout(150):
            while not ((folder / "output").exists() and "unbroken serves" in (folder / "output").read_text()):
                assert process.poll() is None, (folder / "errors").read_text()
                await asyncio.sleep(0.05)
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait, 60)


@dataclass
class Balancer:
    """Sends each request to a random gateway, and asks once more, after a second, one that did not answer it."""

    urls: list[str]
    client: httpx.AsyncClient
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    retries: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    is_half_done: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, path: str, body: Any, headers: Any) -> Any:
        started_s = time.perf_counter()
        for is_last in (False, True):
            try:
                found = await self.client.post(
                    f"{self.draw.choice(self.urls)}{path}",
                    json=body,
                    headers={**headers, "X-Stainless-Retry-Count": str(int(is_last))},  # as SDKs send it
                )
                if found.status_code != 503:
                    break
                reason = found.text
            except httpx.TransportError as error:
                reason = type(error).__name__
            assert not is_last, reason
            self.retries.append(reason)
            await asyncio.sleep(1)
        assert found.status_code == 200, found.text
        self.seconds.append(time.perf_counter() - started_s)
        if len(self.seconds) == NUM_SESSIONS * MEAN_TURNS // 2:
            self.is_half_done.set()
        return found.json()


async def attempt(balancer: Balancer, number: int) -> tuple[str, int]:
    """A session of a random number of turns; returns its id and that number."""
    draw = random.Random(number)
    created = await balancer.post("/v1/sessions", {}, KEY)
    headers, messages = {"Authorization": f"Bearer {created['api_key']}"}, []
    num_turns = min(1 + int(draw.expovariate(1 / (MEAN_TURNS - 1))), 4 * MEAN_TURNS)
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{number} {turn} " + "word " * draw.randrange(30)})
        reply = await balancer.post(CHAT, {"messages": messages}, headers)
        messages.append(reply["choices"][0]["message"])
        await asyncio.sleep(draw.expovariate(20))
    return created["session_id"], num_turns


def check_turns(row: Any) -> int:
    """Check that each turn of a row has the ids that its prompt is answered with; returns how many there are."""
    ids, mask = np.array(row["token_ids"]), np.array([False, *row["sampled_mask"], False])
    borders = np.flatnonzero(mask[1:] != mask[:-1]).tolist()
    for start, stop in zip(borders[::2], borders[1::2], strict=True):
        assert ids[start:stop].tolist() == answer(token_ids(ids[:start]))
    return len(borders) // 2


@dataclass
class Together:
    """Gateways over one store, and what is needed to kill one of them."""

    balancer: Balancer
    kill_one: Callable[[], Awaitable[None]]


@asynccontextmanager
async def started_apart(folder: Path, *place: str | Path) -> AsyncIterator[Together]:
    """Gateways that a balancer stands before."""
    async with AsyncExitStack() as stack:
        gateways = []
        for number in range(NUM_GATEWAYS):
            url = f"http://127.0.0.1:{free_port()}"
            command = started(folder / f"{number}", *place, "--advertise", url, port=url.rpartition(":")[2])
            gateways.append((url, await stack.enter_async_context(command)))
        balancer = Balancer([url for url, _ in gateways], await stack.enter_async_context(make_client()))

        async def kill_one() -> None:
            gateways[0][1].kill()
            await asyncio.sleep(0.5)  # a balancer sees that it is gone
            balancer.urls.pop(0)

        yield Together(balancer, kill_one)


@asynccontextmanager
async def started_as_workers(folder: Path, *place: str | Path) -> AsyncIterator[Together]:
    """One command, whose processes share a port. What it started ends with it."""
    port = free_port()
    async with (
        started(folder / "0", *place, "--workers", str(NUM_WORKERS), port=port) as process,
        make_client() as client,
    ):
        workers = list_workers(process.pid)
        assert len(workers) == NUM_WORKERS

        async def kill_one() -> None:
            os.kill(workers[0], signal.SIGKILL)

        yield Together(Balancer([f"http://127.0.0.1:{port}"], client), kill_one)
        async with asyncio.timeout(60):
            while len(left := list_workers(process.pid)) < NUM_WORKERS:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert workers[0] not in left
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        assert not any(map(is_alive, left))


def make_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))


def make_folder(folder: Path) -> None:
    folder.mkdir()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def list_workers(pid: int) -> list[int]:
    """The processes that a command has started."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("start", [started_apart, started_as_workers])
async def test_no_turn_is_lost_with_a_gateway_that_is_killed(start: Any, tmp_path: Path) -> None:
    server_tokenizer().save_pretrained(tmp_path / "tokenizer")
    engine = scripted_engine(answer)
    with run_postgres() as postgres:
        async with (
            listening(make_app(engine)) as upstream,
            start(tmp_path, postgres.url, upstream, tmp_path / "tokenizer") as together,
        ):
            balancer = together.balancer
            attempts = [asyncio.create_task(attempt(balancer, number)) for number in range(NUM_SESSIONS)]
            await balancer.is_half_done.wait()
            killed_after = len(balancer.seconds)
            await together.kill_one()
            found = await asyncio.gather(*attempts)
            for session_id, num_turns in found:
                path = f"{balancer.draw.choice(balancer.urls)}/v1/sessions/{session_id}"
                session, rows = [
                    (await balancer.client.get(path + more, headers=KEY)).json() for more in ("", "/samples")
                ]
                assert (session["num_turns"], session["forks"]) == (num_turns, [])
                (row,) = rows["samples"]
                assert check_turns(row) == num_turns
    seconds = sorted(balancer.seconds)
    print(
        f"{NUM_SESSIONS} sessions, {sum(num for _, num in found)} turns; killed after {killed_after} answers; "
        f"{len(balancer.retries)} asked once more: {Counter(reason[:60] for reason in balancer.retries)}; median "
        f"{seconds[len(seconds) // 2]:.3f} s, longest {seconds[-1]:.2f} s"
    )
    assert killed_after < len(balancer.seconds)
