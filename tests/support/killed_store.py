"""A process for tests whose children commit turns until they are killed: `killed_store.py LOCATION NUM_SESSIONS`.

For each line that it reads it forks a child, prints `child PID`, and `ended` when the child was killed. The child
prints a line for each turn that it was told is stored: the session and the turn's number.
"""

from __future__ import annotations

import asyncio
import os
import sys

from support.sessions import make_commit
from unbroken.ledger.store import SessionWriter, open_store


def main(location: str, num_sessions: int) -> None:
    for _ in sys.stdin:
        if (pid := os.fork()) == 0:
            asyncio.run(work(location, num_sessions))
        print("child", pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


async def work(location: str, num_sessions: int) -> None:
    store = open_store(location)
    writer = SessionWriter(store)
    async with asyncio.TaskGroup() as group:
        for k in range(num_sessions):
            session = f"session-{k}"
            assert store.acquire(session)
            loaded = store.load(session)
            assert loaded is not None
            group.create_task(commit_turns(writer, session, len(loaded.turns)))
    await writer.close()


async def commit_turns(writer: SessionWriter, session: str, number: int) -> None:
    while True:
        await writer.commit(make_commit(session, number, num_ids=200, text="x" * 3000))
        print(session, number, flush=True)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
