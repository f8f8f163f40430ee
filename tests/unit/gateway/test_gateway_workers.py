"""`--workers`: what becomes of a worker that ends while it, or another one, starts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.waits import wait_until
from support.workers import WorkerOptions, work
from unbroken.gateway import serve
from unbroken.server.process import listen


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, options: WorkerOptions) -> AsyncIterator[asyncio.Task[int]]:
    monkeypatch.setattr(serve, "_work", work)
    monkeypatch.setattr(serve, "_RESTART_S", 0.01)
    with listen("127.0.0.1", 0) as listener:
        made: Any = options
        task = asyncio.create_task(serve.Workers(made, listener).run(), name=str(listener.getsockname()[1]))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])


def port_of(task: asyncio.Task[int]) -> int:
    return int(task.get_name())


def num_serving(folder: Path) -> int:
    return len(list(folder.glob("* serves")))


def read_pid(folder: Path, number: int) -> int:
    file = folder / str(number)
    return int(file.read_text() or 0) if file.exists() else 0


@pytest.mark.parametrize("number", [0, 2], ids=["the first", "another"])
async def test_a_worker_that_is_killed_while_it_starts_is_started_again_with_a_word(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    async with running(monkeypatch, WorkerOptions(folder=tmp_path, waits=(number,))) as task:
        await wait_until(lambda: read_pid(tmp_path, number))
        os.kill(read_pid(tmp_path, number), signal.SIGKILL)
        await wait_until(lambda: read_pid(tmp_path, 3))
        printed: list[str] = []
        await wait_until(lambda: printed.append(capsys.readouterr().out) or "3 workers" in "".join(printed))
        assert not task.done()
    assert task.result() == 0
    assert "ended with status -9 while it started: starting another" in caplog.text


async def test_a_worker_that_ends_by_itself_while_it_starts_ends_the_gateway_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(monkeypatch, WorkerOptions(folder=tmp_path, fails=(1,))) as task:
        assert await asyncio.wait_for(task, 60) == 3
    assert "ended with status 3 before it served: the gateway ends" in caplog.text


async def test_no_client_waits_for_a_worker_that_starts_after_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can connect before all workers are ready: with one that serves alone, a kill would leave none for long."""
    async with running(monkeypatch, WorkerOptions(folder=tmp_path, waits=(1,))) as task:
        await wait_until(lambda: read_pid(tmp_path, 2))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port_of(task))
        os.kill(read_pid(tmp_path, 0), signal.SIGKILL)
        await wait_until(lambda: read_pid(tmp_path, 3))
        assert num_serving(tmp_path) == 0
        os.kill(read_pid(tmp_path, 1), signal.SIGKILL)
        await wait_until(lambda: num_serving(tmp_path) == 3)
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(task))
        writer.close()


async def test_a_worker_that_takes_the_place_of_a_killed_one_serves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(monkeypatch, WorkerOptions(folder=tmp_path)):
        await wait_until(lambda: num_serving(tmp_path) == 3)
        os.kill(read_pid(tmp_path, 1), signal.SIGKILL)
        await wait_until(lambda: (tmp_path / "3 serves").exists())
