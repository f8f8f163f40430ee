"""SIGTERM closes what a run has open, and the process ends with the status that shells give it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from unbroken.cli import main
from unbroken.runs.signals import Terminated

RUN = """
import asyncio, os, signal, sys, threading, time
from unbroken.runs import signals

class Engine:
    async def close(self):
        print("closing", flush=True)
        await asyncio.sleep(600 if sys.argv[2:] == ["hangs"] else 0.1)
        print("closed", flush=True)
        if sys.argv[2:]:
            raise OSError(sys.argv[2])

async def main():
    with signals.cancelled_by_sigterm():
        engine = Engine()
        try:
            print("open", flush=True)
            await asyncio.to_thread(time.sleep, float(sys.argv[1]))
        finally:
            await engine.close()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a shell's background would leave it ignored
signals._THREADS_S = 0.5 if float(sys.argv[1]) > 60 else 60
signals._CLOSING_S = 0.5 if sys.argv[2:] == ["hangs"] else 60
try:
    asyncio.run(main())
except signals.Terminated:
    print("terminated", flush=True)
    sys.exit(signals.TERMINATED)
"""

AT_A_TIME_LIMIT = """
import asyncio, contextlib, os, signal
from unbroken.runs import signals

async def main():
    with signals.cancelled_by_sigterm():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                try:
                    await asyncio.sleep(60)
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0.01)
        print("goes on", flush=True)
        await asyncio.sleep(5)

signals._THREADS_S = 0.5
with contextlib.suppress(signals.Terminated):
    asyncio.run(main())
    print("was not ended")
"""


def run_and_terminate(*words: str, step_s: float, first: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    """The status and what it prints of a process that gets SIGTERM while it closes what it has open."""
    command = [sys.executable, "-c", RUN, str(step_s), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "open\n"
        process.send_signal(first)
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGTERM)
        printed = process.stdout.read()
        return process.wait(timeout=60), printed


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_is_closed_before_the_process_ends_whatever_signal_comes_while_it_closes(first):
    # On a busy machine a short step may end by itself before the first signal comes.
    assert run_and_terminate(step_s=2.0, first=first) == (143, "closed\nterminated\n")


def test_sigterm_ends_a_process_whose_closing_hangs_after_ctrl_c():
    assert run_and_terminate("hangs", step_s=0.1, first=signal.SIGINT) == (143, "")


def test_sigterm_is_not_lost_while_a_time_limit_ends_what_the_task_waits_for():
    command = [sys.executable, "-c", AT_A_TIME_LIMIT]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout == "goes on\n"


def test_a_thread_that_waits_forever_holds_nothing_up():
    assert run_and_terminate(step_s=600) == (143, "closed\n")
    assert run_and_terminate("the connection is gone", step_s=600) == (143, "closed\n"), "also if closing fails"


@pytest.mark.parametrize(
    ("ending", "status", "words"), [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(), 143, "terminated")]
)
def test_a_command_that_is_ended_says_so_and_what_is_kept(monkeypatch, capsys, ending, status, words):
    def end(folder):
        raise ending

    monkeypatch.setattr("unbroken.runs.diagnosis.diary.diagnose_folder", end)
    assert main(["doctor", "runs/sums"]) == status
    assert capsys.readouterr().err == f"unbroken: {words}; nothing was written\n"
