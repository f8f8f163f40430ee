"""Train on the demo's task: follow a chain of lookups with a tool, and give the value at its end.

    unbroken train recipes/lookup.py --algorithm rloo --seed 1 --output runs/lookup-rloo-1

A tiny model that was warmed up until it solves about half of the tasks is trained: with seed 0 the one in the package,
otherwise it is made first. `unbroken demo` is this run with a report. The task, its tool and its environment are in
`src/unbroken/demo/lookup.py`. The same through a server with vLLM: `unbroken train recipes/lookup_through_server.toml`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unbroken.demo.config import LookupConfig
from unbroken.demo.lookup import lookup_problems
from unbroken.demo.warm import write_warm_model
from unbroken.runs.processes import main_process_first
from unbroken.runs.recipe import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(LookupConfig):
    """The demo's settings: 50 steps of 16 tasks in about a minute and a half on two cores."""

    output: Path = Path("runs/lookup")
    model: Path | None = None
    """A warmed-up model, such as the `model` folder of another run; none: make one."""
    num_heads: int = 4
    """Attention heads of the model that is made; 2 makes them wide enough for vLLM."""


async def make_task(config: Config) -> Task:
    """Write a warm model, unless the run has one already, to be trained on lookups."""
    model = config.model or config.output / "model"
    with main_process_first():
        if not model.exists():
            warm_up = partial(write_warm_model, model, config.warm_up, seed=config.seed, num_heads=config.num_heads)
            await asyncio.to_thread(warm_up)
    return Task(
        model=model,
        train_on=lookup_problems("train", config.seed),
        evaluate_on=lookup_problems("evaluation", config.seed),
    )
