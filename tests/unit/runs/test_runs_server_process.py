"""A server that a run starts: its URL, its log, its end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from unbroken.errors import EngineError
from unbroken.runs import engines
from unbroken.runs.engines import start_server

TALKATIVE = """
import sys, time
print("serves tiny at http://127.0.0.1:%s", flush=True)
for _ in range(100):
    print("x" * 10_000, flush=True)
open(sys.argv[1], "w").close()
while True:
    time.sleep(0.05)
"""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"serves tiny at http://127.0.0.1:{os.getpid()}", flush=True)
time.sleep(60)
"""


def wait_for_file(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until, "the server waits"
        time.sleep(0.05)


async def test_a_server_that_prints_more_than_a_pipe_holds_goes_on_and_ends_with_the_run(tmp_path: Path):
    marker = tmp_path / "marker"
    command = [sys.executable, "-c", TALKATIVE % 1234, str(marker)]

    async with start_server(command, tmp_path / "server.log") as url:
        await asyncio.to_thread(wait_for_file, marker)

    assert url == "http://127.0.0.1:1234"
    assert (tmp_path / "server.log").stat().st_size > 1_000_000


async def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(engines, "_STOP_S", 0.1)
    async with start_server([sys.executable, "-c", STUBBORN], tmp_path / "server.log") as url:
        pid = int(url.rpartition(":")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_url_is_that_of_this_start_and_not_of_one_before(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("serves tiny at http://127.0.0.1:1\n")

    async with start_server([sys.executable, "-c", TALKATIVE % 2, str(tmp_path / "marker")], log) as url:
        assert url == "http://127.0.0.1:2"


async def test_a_server_that_ends_before_it_serves_is_an_error_that_names_its_log(tmp_path: Path):
    log = tmp_path / "server.log"
    with pytest.raises(EngineError, match=r"server\.log says why"):
        async with start_server([sys.executable, "-c", "raise SystemExit('no port')"], log):
            pass
    assert "no port" in log.read_text()


async def test_a_server_that_hangs_while_it_starts_is_ended_and_named(tmp_path: Path, caplog):
    log = tmp_path / "server.log"
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(EngineError, match=rf"did not serve within 2 s \(wait_s\): see {log}"):
        async with start_server([sys.executable, "-c", code], log, wait_s=2.0):
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


async def test_a_line_that_comes_in_pieces_is_read_whole(tmp_path: Path):
    code = """
import sys, time
for part in ("serves ti", "ny at http://127", ".0.0.1:7", "\\n"):
    print(part, end="", flush=True)
    time.sleep(0.3)
time.sleep(60)
"""
    async with start_server([sys.executable, "-c", code], tmp_path / "server.log") as url:
        assert url == "http://127.0.0.1:7"
