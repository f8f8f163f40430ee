"""What takes long says how far it is, from any depth, and what is quick says nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from support.waits import wait_until
from unbroken import progress
from unbroken.audit import process as audit_process
from unbroken.audit.config import AuditConfig, AuditTarget
from unbroken.limited_process import ProcessLimits


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.01)


async def until_said(lines: list[str], begins: str) -> None:
    await wait_until(lambda: any(line.startswith(begins) for line in lines))


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (("loading", 0, None, "", 61.2), "loading: 0:01:01 so far"),
        (("evaluation", 0, 64, "rollouts", 20.0), "evaluation: 0 of 64 rollouts in 0:00:20"),
        (("evaluation", 24, 64, "rollouts", 20.0), "evaluation: 24 of 64 rollouts in 0:00:20, about 0:00:33 left"),
        (("step 0", 70, 64, "rollouts", 20.0), "step 0: 64 of 64 rollouts in 0:00:20"),
    ],
)
def test_a_line_says_what_is_done_of_how_many_and_what_time_is_left(work, line):
    *what, seconds = work
    assert progress._describe(*what, seconds=seconds) == line


async def test_whoever_does_the_work_is_counted_in_tasks_and_threads():
    lines: list[str] = []
    with progress.show_progress(lines.append):
        progress.begin("sums", total=3, unit="rows")

        async def work() -> None:
            progress.advance()

        await asyncio.gather(work(), asyncio.to_thread(progress.advance))
        await until_said(lines, "sums: 2 of 3 rows")
        progress.begin("loading")
        await until_said(lines, "loading: ")
    number = len(lines)
    progress.advance()
    progress.begin("later")
    assert (len(lines), threading.active_count()) == (number, threading.active_count())


async def test_a_command_within_a_command_speaks_by_the_outer_one():
    outer: list[str] = []
    inner: list[str] = []
    with progress.show_progress(outer.append), progress.show_progress(inner.append):
        progress.begin("sums")
        await until_said(outer, "sums")
    assert inner == []


def test_what_ends_at_once_says_nothing(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    lines: list[str] = []
    with progress.show_progress(lines.append):
        progress.begin("sums", total=3, unit="rows")
    assert lines == []


def test_an_audit_says_that_it_goes_on(monkeypatch, capsys):
    shown: list[str] = []

    class Slow:
        """Answers once a line was printed."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def call(self, *_: object) -> str:
            asyncio.run(wait_until(lambda: shown.append(capsys.readouterr().err) or "audit of" in "".join(shown)))
            return "report"

        def close(self) -> None: ...

    monkeypatch.setattr(audit_process, "LimitedProcess", Slow)
    found: Callable[..., object] = audit_process.run_in_process
    assert found(AuditTarget(model="m"), AuditConfig(), ProcessLimits(timeout_s=9)) == "report"
    assert "audit of m (it may take 9 s): 0:00:00 so far" in "".join(shown)
