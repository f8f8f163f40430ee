"""Simulate one schedule: the real loop (`run_steps`) on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.simulation.clock import run_on_virtual_clock
from unbroken.simulation.config import SimulationConfig
from unbroken.simulation.engine import SimulatedEngine
from unbroken.simulation.source import SimulatedSource
from unbroken.simulation.trainer import SimulatedStep, SimulatedTrainer
from unbroken.simulation.workload import Plan, RandomPlan
from unbroken.timeline import Timeline, TraceFile
from unbroken.training.asynchronous.idle import IdleTimes
from unbroken.training.asynchronous.loop import run_steps
from unbroken.training.asynchronous.tracks import Observers, TimelineObserver
from unbroken.training.config import LoopConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a schedule, without its first steps, and those at the end for which nothing more was sampled."""

    max_staleness: int
    total_s: float
    steps: Sequence[SimulatedStep]
    """Those that count."""

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.total_s / len(self.steps)

    @property
    def groups_per_s(self) -> float:
        """Groups trained in a second."""
        return sum(step.num_groups for step in self.steps) / self.total_s

    @property
    def ids_by_staleness(self) -> Counter[int]:
        """Sampled ids that were trained, by staleness."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.ids_by_staleness)
        return total

    @property
    def mean_staleness(self) -> float:
        """Of the ids that were trained."""
        counts = self.ids_by_staleness
        return sum(lag * count for lag, count in counts.items()) / counts.total()

    @property
    def given_up_share(self) -> float:
        """Share of all groups that were cancelled or dropped."""
        given_up = sum(step.num_given_up for step in self.steps)
        return given_up / (given_up + sum(step.num_groups for step in self.steps))

    def mean_idle(self, name: str) -> float:
        """The mean of an idle share over the steps, each weighed by its time."""
        starts = [step.begun_s for step in self.steps]
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        shares = [step.idle[name] or 0.0 for step in self.steps[1:]]
        total_s = sum(lengths)
        if not total_s:
            return self.steps[0].idle[name] or 0.0
        return sum(share * length for share, length in zip(shares, lengths, strict=True)) / total_s


def simulate(config: SimulationConfig, max_staleness: int, *, plan: Plan | None = None) -> Outcome:
    """Simulate one schedule, with the rollouts of `plan` instead of the config's lengths and turns.

    Worked example: groups that take 3 s however many there are, steps of 2 s, 0.5 s to publish. With staleness 0 a step
    takes 5.5 s. With 2, groups for two steps and more are in flight at once, and a step takes 2 s. With 2 and no more
    groups in flight than a step has, it takes 3 s.
    """
    loop_config = LoopConfig(
        num_steps=config.num_steps + count_ending_steps(max_staleness),
        max_staleness=max_staleness,
        adapt_ahead=config.adapt_ahead,
        max_drops=config.max_drops,
        max_groups_in_flight=config.max_groups_in_flight,
        publish_beside_step=config.publish_beside_step and max_staleness > 0,
    )
    plan = plan or RandomPlan(config=config.workload, seed=config.seed)
    steps = run_on_virtual_clock(_run(config, loop_config, plan))
    first, *counted = steps[config.num_warmup - 1 : config.num_steps]
    return Outcome(max_staleness=max_staleness, total_s=counted[-1].ended_s - first.ended_s, steps=counted)


def count_ending_steps(max_staleness: int) -> int:
    """How many steps at the end of a run may find all groups sampled: with nothing beside them, they take less time."""
    return max_staleness + 1 if max_staleness else 0


async def _run(config: SimulationConfig, loop_config: LoopConfig, plan: Plan) -> Sequence[SimulatedStep]:
    timeline = _open_timeline(config.timelines, loop_config.max_staleness)
    engine, idle, may_sample = SimulatedEngine(config.engine), IdleTimes(), asyncio.Event()
    may_sample.set()
    trainer = SimulatedTrainer(
        times=config.trainer,
        engine=engine,
        idle=idle,
        timeline=timeline,
        is_serial=loop_config.max_staleness == 0,
        may_sample=may_sample,
    )
    source = SimulatedSource(engine=engine, plan=plan, config=config.workload, may_sample=may_sample)
    try:
        await run_steps(source, trainer, loop_config, observer=Observers([idle, TimelineObserver(timeline)]))
    finally:
        timeline.close()
    return trainer.steps


def _open_timeline(folder: Path | None, max_staleness: int) -> Timeline:
    if folder is None:
        return Timeline()
    path = folder / f"staleness-{max_staleness}.json"
    path.unlink(missing_ok=True)
    file = TraceFile(path, max_bytes=None)
    loop = asyncio.get_running_loop()
    return Timeline(file, name=f"staleness {max_staleness}", clock=loop.time, origin_s=0.0)
