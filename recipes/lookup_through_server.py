"""Train the demo's task with generation in a server: rollouts over HTTP, new weights through files after every step.

    python recipes/lookup_through_server.py --engine vllm --num-steps 50

Top to bottom: a warmed-up model on disk, `unbroken serve` on it in a process of its own, and the loop that the demo
runs in one process. The trainer and the server share nothing but a port and a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unbroken.client import AsyncClient
from unbroken.demo.model import build_model
from unbroken.demo.run import Stack, tool_schemas
from unbroken.demo.task import LookupTask
from unbroken.demo.tokenizer import build_tokenizer
from unbroken.demo.warmup import Teacher, WarmUpConfig, warm_up
from unbroken.engines.http import HttpEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.advantages import AdvantageFn, grpo_advantages, rloo_advantages
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.metrics import Metrics, MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.weights.disk import DiskPublisher

ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo_advantages, "rloo": rloo_advantages}
ENGINE_OPTIONS = {
    "transformers": [],
    "vllm": ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"],
}


@contextmanager
def serving(model: Path, weights: Path, engine: str, log: Path) -> Iterator[str]:
    """`unbroken serve` on a model folder, until the block ends: its URL."""
    command = [
        sys.executable, "-m", "unbroken", "serve", "--model", str(model), "--engine", engine, "--port", "0",
        "--weights-dir", str(weights), *ENGINE_OPTIONS[engine],
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            url = next((found[1] for line in lines if (found := re.search(r" at (http://\S+)", line))), None)
            if url is None:
                raise SystemExit(f"the server does not start; {log} says why")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=90)


async def reinforce(model: Any, stack: Stack, publisher: DiskPublisher, arguments: argparse.Namespace) -> None:
    """The training loop, with what is printed of each step."""
    rng = random.Random(arguments.seed + 1)
    optimizer = OptimizerConfig(learning_rate=5e-4, betas=(0.9, 0.99), warmup_updates=10)
    trainer = Trainer(model, TrainerConfig(optimizer=optimizer, num_minibatches=2, seed=arguments.seed))

    async def collect() -> list[TrajectoryGroup]:
        tasks = [LookupTask.draw(rng) for _ in range(arguments.tasks_per_step)]
        return await asyncio.gather(*(stack.group(task, arguments.group_size) for task in tasks))

    def show(step: int, metrics: Metrics) -> None:
        names = (
            "reward/mean",
            "mismatch/k3",
            "mismatch/max_abs",
            "seconds/collect",
            "seconds/train",
            "seconds/publish",
        )
        print(step + 1, *(f"{name} {metrics.get(name) or 0:.3g}" for name in names), sep="  ", flush=True)

    with MetricsWriter(arguments.output / "metrics") as metrics:
        await train(
            collect,
            trainer=trainer,
            publisher=publisher,
            advantages=ADVANTAGES[arguments.algorithm],
            metrics=metrics,
            config=LoopConfig(num_steps=arguments.num_steps),
            on_step=show,
        )


async def main(arguments: argparse.Namespace) -> None:
    """Make the model, serve it, train it."""
    tools = tool_schemas()
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, seed=arguments.seed, num_heads=2)
    config = WarmUpConfig(max_drill_steps=arguments.max_drill_steps, num_demo_steps=arguments.num_demo_steps)
    warm_up(model, tokenizer, Teacher(tokenizer, tools), config, seed=arguments.seed)
    folder, weights = arguments.output / "model", arguments.output / "weights"
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    with serving(folder, weights, arguments.engine, arguments.output / "server.log") as url:
        engine = await HttpEngine.connect([url])
        async with AsyncClient(url) as client:
            try:
                stack = Stack(engine=engine, renderer=TemplateRenderer(tokenizer))
                await reinforce(model, stack, DiskPublisher([client], weights), arguments)
            finally:
                await engine.close()


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are the demo's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINE_OPTIONS, default="vllm")
    parser.add_argument("--algorithm", choices=ADVANTAGES, default="grpo")
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--max-drill-steps", type=int, default=WarmUpConfig().max_drill_steps)
    parser.add_argument("--num-demo-steps", type=int, default=WarmUpConfig().num_demo_steps)
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/lookup-through-server"))
    return parser.parse_args(given)


if __name__ == "__main__":
    asyncio.run(main(parse_arguments()))
