"""Training loops of two processes of which one fails in something that the other does not do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from support.flaky_server import Server
from support.loops import Callbacks, EachStep
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.steps import train
from unbroken.errors import RewardError, ServerUnreachableError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OutageConfig, TrainerConfig
from unbroken.training.metrics.writer import Metrics
from unbroken.training.trainer import Trainer

WHERE = ("sample", "record", "choices", "make_units", "before_update", "on_step", "extra", "engine")


class _Choosing(EachStep):
    """Chooses its problems; the method `fails_in` fails."""

    def __init__(self, sample: Callable[[int], Awaitable[TrajectoryGroup]], *, fails_in: str | None) -> None:
        super().__init__(sample)
        self._fails_in = fails_in

    def record(self, number: int, group: TrajectoryGroup) -> None:
        """See `GroupSource`."""
        self._call("record")

    def choices(self) -> Mapping[str, Any]:
        """See `GroupSource`."""
        self._call("choices")
        return {"next": {1, 2} if self._fails_in == "extra" else [1, 2]}  # a set is nothing that JSON can hold

    def restore_choices(self, choices: Mapping[str, Any], /) -> None:
        """See `GroupSource`."""

    def _call(self, name: str) -> None:
        if name == self._fails_in:
            raise RuntimeError(f"no {name}")


def run(accelerator: Accelerator, rank: int, directory: Path) -> None:
    """In each of `WHERE`, let the second process fail, and save what each process raised."""
    raised = {where: asyncio.run(_run(where, accelerator, rank, directory / f"failing-{where}")) for where in WHERE}
    (directory / f"failing-{rank}.json").write_text(json.dumps(raised))


async def _run(where: str, accelerator: Accelerator, rank: int, directory: Path) -> str:
    fails = rank == 1

    async def sample(number: int) -> TrajectoryGroup:
        if where == "sample" and fails:
            raise RewardError("row 5: nan")
        if where == "engine" and fails:
            raise ServerUnreachableError("the server is away")
        return group(trajectory(float("nan") if where == "make_units" and fails else 1.0), trajectory(0.0))

    async def before_update() -> None:
        if where == "before_update" and fails:
            raise RuntimeError("no sleep")

    def on_step(step: int, metrics: Metrics) -> None:
        if where == "on_step" and fails:
            raise RuntimeError("no screen")

    is_chosen = where in ("record", "choices", "extra")
    try:
        await train(
            _Choosing(sample, fails_in=where if fails else None) if is_chosen else EachStep(sample),
            trainer=Trainer(tiny_qwen3(), TrainerConfig(), accelerator=accelerator),
            publisher=None,
            metrics=None,
            config=LoopConfig(num_steps=1, outages=OutageConfig(wait_s=5.0, ask_every_s=0.1)),
            observer=Callbacks(on_step=on_step, before_update=before_update),
            checkpoints=Checkpoints(directory) if where == "extra" else None,
            engine=Server() if where == "engine" and not fails else None,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
