"""A process of a run that does nothing but end together with the others: `python -m support.lost_process CASE`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable

from torch.distributed import group

from unbroken.runs import processes

RANK = os.environ["RANK"]
learned = asyncio.Event()
"""Set once this process knows that another one was lost or has failed."""


async def killed_before() -> None:
    """Process 1 is killed before it connects."""
    await asyncio.sleep(600)


async def ends_well() -> None:
    """Process 1 fails; process 0 ends well after it has learned that, and then takes its time."""
    if RANK == "1":
        raise ValueError("no such row")
    await learned.wait()


async def computes() -> None:
    """Process 1 computes in the loop's thread, at once and for longer than a stranger is given."""
    if RANK == "1":
        time.sleep(2.5)  # noqa: ASYNC251
    await asyncio.sleep(3.0)


async def first_computes() -> None:
    """Process 0 computes in the loop's thread for longer than others are waited for, and again in each of its turns."""
    store = group.WORLD.get_group_store()
    if RANK == "0":
        await asyncio.sleep(0)
        store.wait(["connected"])
        for seconds in (1.5, *[0.3] * 8):
            time.sleep(seconds)  # noqa: ASYNC251
            await asyncio.sleep(0)
        await asyncio.sleep(0.5)
        store.set("done", "")
    else:
        store.set("connected", "")
        await asyncio.to_thread(store.wait, ["done"])
    assert not learned.is_set(), "nobody was lost"


async def interrupted() -> None:
    """A launcher ends both at once; process 0 closes what it has open for longer than process 1."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.2, task.cancel)
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(1.0 if RANK == "0" else 0.0)
        print("closed", flush=True)


async def cannot_listen() -> None:
    """Process 0 has no address."""


async def strangers() -> None:
    """Process 1 has five others connect to process 0, which say nothing, and then one that says too much."""
    if RANK == "1":
        host, port = json.loads(group.WORLD.get_group_store().get("unbroken/others/1"))[1:3]
        silent = [socket.create_connection((host, port), 5) for _ in range(5)]
        assert [await asyncio.to_thread(each.recv, 1) for each in silent] == [b""] * 5
        with socket.create_connection((host, port), 5) as loud:
            loud.sendall(b"token 1 \xff\n" + bytes(99))
            assert await asyncio.to_thread(loud.recv, 1) == b""
        group.WORLD.get_group_store().set("done", "")
    else:
        await asyncio.to_thread(group.WORLD.get_group_store().wait, ["done"])


async def run(case: Callable[[], Awaitable[None]]) -> None:
    """Run a case, as a run of training does."""
    async with processes.ended_together():
        await case()


def main(case: str) -> None:
    """Run one of the cases."""
    processes._MEET_S = {"killed_before": 3.0, "first_computes": 1.0}.get(case, 60.0)
    processes._HANDSHAKE_S = 0.2 if case == "first_computes" else 1.0
    processes._OWN_ERROR_S, processes._THREADS_S = 1.0, 0.8
    if case == "interrupted":
        processes._OWN_ERROR_S, processes._THREADS_S = 0.3, 60.0
    lose = processes._Others._lose
    processes._Others._lose = lambda self, reason: (lose(self, reason), learned.set())  # type: ignore[method-assign]
    processes.join_processes()
    if case == "killed_before" and RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "cannot_listen" and RANK == "0":
        del os.environ["MASTER_ADDR"]
    registered = []
    os.register_at_fork = lambda **what: registered.append(what)
    asyncio.run(run(globals()[case]))
    assert len(registered) == 1
    time.sleep(1)
    print("ended well")


if __name__ == "__main__":
    main(sys.argv[1])
