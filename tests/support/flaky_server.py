"""A simulated server that goes away, data sampled by it, and a run of several processes with one server each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.sequences import sampled
from support.sharded import shared
from support.steps import train
from unbroken.errors import ServerUnreachableError
from unbroken.rollout.trajectory import TrajectoryGroup, TrajectoryStatus
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OutageConfig, ParallelConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.observer import StepRollouts
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate


class Server:
    """A simulated server that goes away on request, and comes back with version 0."""

    def __init__(self, *, vocab_size: int = 64, policy_version: int = 0) -> None:
        self.vocab_size = vocab_size
        self.policy_version = policy_version
        self.num_refusals = 0
        """Set how many more calls fail; after them the server has restarted."""
        self.required: list[int] = []
        self.loaded: list[int] = []

    def goes_away(self, num_refusals: int) -> None:
        self.num_refusals, self.policy_version = num_refusals, 0

    def require_version(self, policy_version: int) -> None:
        self.required.append(policy_version)

    async def check_health(self) -> None:
        if self.num_refusals > 0:
            self.num_refusals -= 1
            raise ServerUnreachableError("the server is away")

    async def publish(self, named_parameters: Any, *, policy_version: int) -> WeightUpdate:
        await self.check_health()
        assert len(list(named_parameters)) > 0
        self.policy_version = policy_version
        self.loaded.append(policy_version)
        return WeightUpdate(num_bytes=1, seconds=0.0)


class Data(GroupSource):
    """A data set of a row a step, sampled by a server; `events` are called before a row is sampled."""

    groups_per_step = 1

    def __init__(self, server: Server, events: Mapping[int, Callable[[], None]] | None = None) -> None:
        self.server = server
        self.trained_rows: list[int] = []
        self.num_sampled = 0
        self._events = dict(events or {})

    async def see(self, rollouts: StepRollouts) -> None:
        self.trained_rows += [int(each.trajectories[0].tree.nodes[0].token_ids[0]) for each in rollouts.groups]

    async def sample(self, row: int) -> TrajectoryGroup:
        self.num_sampled += 1
        members = []
        for k in range(4):
            if k == 2 and (event := self._events.pop(row, None)) is not None:
                event()
            try:
                await self.server.check_health()
            except ServerUnreachableError as error:
                members.append(replace(trajectory(None, status=TrajectoryStatus.FAILED), error=error))
            else:
                sequence = sampled(7, 8, versions=[self.server.policy_version] * 2)
                members.append(trajectory(float(k), prompt=(row, 6), completion=sequence))
        return group(*members)


def run(name: str, parallel: ParallelConfig, accelerator: Accelerator, rank: int, directory: Path) -> None:
    """Train three steps; in the second one the last process's server goes away and restarts."""
    output = directory / f"lost-{name}"
    server = Server()
    data = Data(server, {1: lambda: server.goes_away(3)} if rank > 0 else {})
    metrics = MetricsWriter(output) if rank == 0 else None
    asyncio.run(
        train(
            data,
            trainer=Trainer(shared(tiny_qwen3(), parallel), TrainerConfig(parallel=parallel), accelerator=accelerator),
            publisher=server,
            metrics=metrics,
            config=LoopConfig(num_steps=3, outages=OutageConfig(wait_s=60.0, ask_every_s=0.01)),
            checkpoints=Checkpoints(output / "checkpoints", every=1),
            engine=server,
            observer=Callbacks(on_rollouts=data.see),
        )
    )
    if metrics is not None:
        metrics.close()
    found = {"rows": data.trained_rows, "loaded": server.loaded, "num_sampled": data.num_sampled}
    (directory / f"lost-{name}-{rank}.json").write_text(json.dumps(found))
