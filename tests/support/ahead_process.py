"""One of two processes that train asynchronously, each with a sampler and an engine of its own; a test starts it.

Arguments: the folder, and the case: `whole`, `outage` (the second process's engine goes away for a while), `fails` (a
reward of the second process is wrong), `shared` (the first process publishes for both), or `replaced` (groups without
variance are replaced; the second process comes to its bound) with and `filled` without asynchronous training.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import trajectory
from support.sequences import sampled
from support.steps import train
from unbroken.errors import OutageError, RewardError, ServerUnreachableError, UnbrokenError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OutageConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.training.waits import Notices
from unbroken.weights.base import WeightUpdate

NUM_STEPS = 8
MAX_STALENESS = 2
CASES = ("whole", "outage", "fails", "shared")
REPLACED_CASES = ("replaced", "filled")


class Server:
    """A simulated engine: its version, and whether it is there."""

    vocab_size = 64

    def __init__(self, version_file: Path | None = None) -> None:
        self._version = 0
        self._version_file = version_file
        """A file that two processes share."""
        self.away = 0
        self.required: list[int] = []

    def require_version(self, policy_version: int) -> None:
        """See `HttpEngine`."""
        self.required.append(policy_version)

    @property
    def policy_version(self) -> int:
        """See `Engine`."""
        if self._version_file is not None and self._version_file.exists():
            return int(self._version_file.read_text())
        return self._version

    async def check_health(self) -> None:
        """See `Engine`: it is back after it was asked often enough."""
        if self.away > 0:
            self.away -= 1
            raise ServerUnreachableError("the server is away")

    async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
        """See `WeightPublisher`."""
        await self.check_health()
        assert len(list(named_parameters)) > 0
        await asyncio.sleep(0.01)
        self._version = policy_version
        if self._version_file is not None:
            written = self._version_file.with_suffix(".new")
            written.write_text(str(policy_version))
            written.rename(self._version_file)
        return WeightUpdate(num_bytes=1, seconds=0.01)


class Source(GroupSource):
    """This process's groups, with the time that each takes."""

    def __init__(self, server: Server, rank: int, case: str) -> None:
        self.groups_per_step = 2 - rank
        self._server = server
        self._rank = rank
        self._case = case
        self.trained: list[int] = []

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        first = self._server.policy_version
        await asyncio.sleep(0.2 if number == 5 else 0.01 * (number % 3))
        if self._rank == 1 and number == 4:
            if self._case == "fails":
                raise RewardError("row 4: nan")
            if self._case == "outage":
                self._case = "whole"
                self._server.away = 5
        await self._server.check_health()
        versions = [first, first, self._server.policy_version]
        members = [
            trajectory(reward, completion=sampled(3, 4, 9, versions=versions), name=str(number))
            for reward in self._rewards(number)
        ]
        return TrajectoryGroup(group_id=str(number), trajectories=tuple(members))

    def _rewards(self, number: int) -> tuple[float, float]:
        is_equal = self._case in REPLACED_CASES and (number % 3 == 0 or (self._rank == 1 and 6 < number < 15))
        return (1.0, 1.0) if is_equal else (0.0, 1.0)


async def exchange_notices(accelerator: Accelerator, rank: int) -> list[bool]:
    """What the second process hears of two versions that the first one publishes."""
    notices = await Notices.open(Trainer(tiny_qwen3(), TrainerConfig(), accelerator=accelerator))
    if rank == 1:
        return [await notices.wait_for(1), await notices.wait_for(2)]
    async with notices.announce(1):
        await asyncio.sleep(0.05)
    with suppress(OutageError):
        async with notices.announce(2):
            raise OutageError("no engine takes it")
    return []


async def run(accelerator: Accelerator, rank: int, directory: Path, case: str) -> dict[str, Any]:
    """Train, and return what was trained, or the error."""
    shared = case == "shared"
    server = Server(directory / "version" if shared else None)
    source = Source(server, rank, case)
    config = PolicyGradient().for_stale_rows(TrainerConfig())
    trainer = Trainer(tiny_qwen3(), config, accelerator=accelerator)

    async def on_rollouts(rollouts: Any) -> None:
        source.trained += [int(each.group_id) for each in rollouts.groups]

    error = ""
    try:
        with MetricsWriter(directory / f"metrics-{rank}") as metrics:
            await train(
                source,
                trainer=trainer,
                publisher=None if shared and rank == 1 else server,
                metrics=metrics if rank == 0 else None,
                config=LoopConfig(
                    num_steps=NUM_STEPS,
                    max_staleness=0 if case == "filled" else MAX_STALENESS,
                    max_replacements=1 if case in REPLACED_CASES else None,
                    outages=OutageConfig(ask_every_s=0.01, wait_s=20),
                ),
                checkpoints=Checkpoints(directory / "checkpoints", every=1),
                engine=server,  # type: ignore[arg-type]
                observer=Callbacks(on_rollouts=on_rollouts),
            )
    except UnbrokenError as raised:
        error = f"{type(raised).__name__}: {raised}"
    weights = sum(float(weight.double().sum()) for _, weight in trainer.named_weights())
    return {
        "required": server.required,
        "trained": source.trained,
        "error": error,
        "version": trainer.policy_version,
        "weights": weights,
    }


def main() -> None:
    """Run all cases, and save what each process has."""
    faulthandler.dump_traceback_later(400, exit=True)
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for case in (*CASES, *REPLACED_CASES):
        (directory / case).mkdir(exist_ok=True)
    results = {case: asyncio.run(run(accelerator, rank, directory / case, case)) for case in (*CASES, *REPLACED_CASES)}
    results["notices"] = {"heard": asyncio.run(exchange_notices(accelerator, rank))}
    (directory / f"results-{rank}.json").write_text(json.dumps(results))
    accelerator.wait_for_everyone()
    os._exit(0)


if __name__ == "__main__":
    main()
