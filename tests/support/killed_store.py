"""Processes that commit turns until they are killed, and a check of what they leave.

As a program, `killed_store.py LOCATION`, it forks a child for each line that it reads, prints `child PID`, and `ended`
when the child was killed. The child prints a line for each turn after it was stored: session and number.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

from support.sessions import make_commit, make_session
from unbroken.ledger.store import SessionStore, SessionWriter, open_store

NUM_SESSIONS = 4


def kill_and_check(location: str, *, num_kills: int) -> int:
    """Kill processes at random moments, one after the other on the same sessions, and check what each one left.

    Returns how many turns they had acknowledged, all of which are there.
    """
    store = open_store(location)
    for k in range(NUM_SESSIONS):
        store.create(make_session(f"session-{k}"))
    store.close()
    moments = random.Random(0)
    num_acknowledged = 0
    with Killed(location) as killed:
        for _ in range(num_kills):
            acknowledged = killed.run(after_s=moments.uniform(0, 0.05))
            num_acknowledged += sum(map(len, acknowledged.values()))
            store = open_store(location)
            for k in range(NUM_SESSIONS):
                check_turns(store, f"session-{k}", acknowledged.get(f"session-{k}", []))
            store.close()
    return num_acknowledged


def check_turns(store: SessionStore, session_id: str, acknowledged: list[int]) -> None:
    """All acknowledged turns are stored, and no turn is stored in part."""
    loaded = store.load(session_id)
    assert loaded is not None
    numbers = [turn.number for turn in loaded.turns]
    assert numbers == list(range(len(numbers)))
    assert set(acknowledged) <= set(numbers)
    assert [message.node for message in loaded.messages] == list(range(2 * len(numbers)))
    assert loaded.counters.get("bridges/derived", 0) == max(0, len(numbers) - 1)
    assert all(len(turn.sequence.completion_ids) == 200 for turn in loaded.turns)


class Killed:
    """Processes that commit until they are killed, each forked from one that has imported what they need."""

    def __init__(self, location: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, location],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Killed:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, *, after_s: float) -> dict[str, list[int]]:
        """Kill a process `after_s` after its first turn; returns the turns of each session that it has stored."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        pid = None
        acknowledged: dict[str, list[int]] = {}
        for line in self._process.stdout:
            match line.split():
                case ["child", number]:
                    pid = int(number)
                case ["ended"]:
                    break
                case [session, number]:
                    acknowledged.setdefault(session, []).append(int(number))
            if pid is not None and acknowledged:
                time.sleep(after_s)
                os.kill(pid, signal.SIGKILL)
                pid = None
        return acknowledged


def main(location: str) -> None:
    for _ in sys.stdin:
        if (pid := os.fork()) == 0:
            asyncio.run(work(location))
        print("child", pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


async def work(location: str) -> None:
    store = open_store(location)
    writer = SessionWriter(store)
    async with asyncio.TaskGroup() as group:
        for k in range(NUM_SESSIONS):
            session = f"session-{k}"
            while not store.acquire(session):  # noqa: ASYNC110  # the server notices the end of the last owner later
                await asyncio.sleep(0.001)
            loaded = store.load(session)
            assert loaded is not None
            group.create_task(commit_turns(writer, session, len(loaded.turns)))
    await writer.close()


async def commit_turns(writer: SessionWriter, session: str, number: int) -> None:
    while True:
        await writer.commit(make_commit(session, number, num_ids=200, text="x" * 3000))
        print(f"{session} {number}\n", end="", flush=True)  # in one write, which a kill cannot cut
        number += 1


if __name__ == "__main__":
    main(sys.argv[1])
