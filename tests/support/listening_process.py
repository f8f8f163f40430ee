"""A process of a run that prints at which addresses it listens: `python -m support.listening_process`."""

from __future__ import annotations

import asyncio
import json

import psutil
import torch

from unbroken.runs import processes


async def print_addresses() -> None:
    """Print them once all processes have met, and have sent each other something."""
    async with processes.ended_together():
        torch.distributed.all_reduce(torch.ones(1))
        own = psutil.Process().net_connections(kind="tcp")
        print(json.dumps([each.laddr.ip for each in own if each.status == psutil.CONN_LISTEN]), flush=True)
        torch.distributed.barrier()


if __name__ == "__main__":
    processes.join_processes()
    asyncio.run(print_addresses())
