"""Measures how long a training pass takes beside rollouts in the same process, by the interpreter's switch interval.

    OMP_NUM_THREADS=1 python bench/switch_interval.py [--intervals 0.005 0.0005] [--idle 0 0.01] [--rounds 5]

torch gives the interpreter lock away in each operation, and has to get it back from the event loop, which keeps it for
up to the interval (`sys.setswitchinterval`). A pass here is a forward pass of 28 narrow layers, whose operations are as
short as launches on a GPU; beside it an event loop runs batches of 16 rollouts of two turns with a scripted engine, and
sleeps for `--idle` seconds after each. Needs two idle cores. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import numpy as np

from loop_lag import make_rollout, make_tool, make_words
from rendering import make_tokenizer
from trainer import make_trainer, make_trajectory, time_pass
from unbroken.ledger.export import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams, TrainingSample

BATCH = 16
PASSES = 8


class Rollouts:
    """Runs batches of rollouts until it is cancelled."""

    def __init__(self) -> None:
        self.num_done = 0
        self._tokenizer = make_tokenizer("qwen3")
        self._renderer = TemplateRenderer(self._tokenizer)
        self._tool = make_tool(0, make_words(2000), raises=False)

    async def run(self, *, idle_s: float) -> None:
        """Run batches, with a pause after each."""
        while True:
            await self.run_batch()
            await asyncio.sleep(idle_s)

    async def run_batch(self) -> None:
        """Run a batch."""
        await asyncio.gather(*(self._run_one() for _ in range(BATCH)))
        self.num_done += BATCH

    async def _run_one(self) -> None:
        env, engine = make_rollout(self._tokenizer, self._tool)
        sampling, limits = SamplingParams(max_tokens=100), Limits()
        await run_rollout(env, engine=engine, renderer=self._renderer, sampling=sampling, limits=limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.005, 0.0005], help="seconds")
    parser.add_argument("--idle", type=float, nargs="+", default=[0.0, 0.02], help="seconds after each batch")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    trainer, rng = make_trainer(num_layers=28, hidden_size=32), np.random.default_rng(0)
    trees = [make_trajectory(2, prompt=20, turn=20, bridge=10, rng=rng) for _ in range(16)]
    rows = [row for tree in trees for row in export_samples(tree, 1.0)]
    rollouts = Rollouts()
    asyncio.run(rollouts.run_batch())  # the first one proves the template's bridges
    time_pass(trainer, rows)
    alone = statistics.median(time_pass(trainer, rows) for _ in range(arguments.rounds))
    print(f"a pass alone: {alone:.3f} s")
    for idle_s in arguments.idle:
        print(f"\n{idle_s:g} s after each batch\ninterval    s a pass  times alone  rollouts/s")
        taken: dict[float, list[tuple[float, float]]] = {interval: [] for interval in arguments.intervals}
        for _ in range(arguments.rounds):
            for interval in arguments.intervals:
                sys.setswitchinterval(interval)
                taken[interval].append(asyncio.run(time_beside(trainer, rows, rollouts, idle_s=idle_s)))
        for interval, measured in taken.items():
            pass_s, rate = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{interval:<10g}{pass_s:>10.3f}{pass_s / alone:>13.2f}{rate:>12.0f}")


async def time_beside(
    trainer: Trainer, rows: list[TrainingSample], rollouts: Rollouts, *, idle_s: float
) -> tuple[float, float]:
    """Seconds of a pass in a thread beside rollouts, and how many of these ended in a second."""
    running = asyncio.create_task(rollouts.run(idle_s=idle_s))
    rollouts.num_done, start = 0, time.perf_counter()
    await asyncio.to_thread(lambda: [time_pass(trainer, rows) for _ in range(PASSES)])
    seconds = time.perf_counter() - start
    running.cancel()
    return seconds / PASSES, rollouts.num_done / seconds


if __name__ == "__main__":
    main()
