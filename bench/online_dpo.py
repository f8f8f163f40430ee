"""Does online DPO raise the win rate of its reward? On the demo's task, against the policy that it began with.

    OMP_NUM_THREADS=1 python bench/online_dpo.py --seed 0

The win rate is the share of tasks on which the trained policy's rollout has a higher reward than the first policy's on
the same task, ties counting half; 0.5 is no change. Both are sampled at temperature 1, and the first policy is the
reference.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unbroken.demo.model import build_model
from unbroken.demo.progress import Display
from unbroken.demo.run import DemoConfig, Stack, evaluate, success, tool_schemas
from unbroken.demo.task import LookupTask
from unbroken.demo.tokenizer import build_tokenizer
from unbroken.demo.warmup import Teacher, WarmUpConfig, warm_up
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.config import DpoConfig, LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.preferences import PairFn, best_and_worst, outside_in
from unbroken.training.trainer import Trainer
from unbroken.weights.in_process import InProcessPublisher

PAIRS: dict[str, PairFn] = {"best_and_worst": best_and_worst, "outside_in": outside_in}
SHOWN = ("reward/mean", "dpo/num_pairs", "dpo/accuracy", "dpo/margin", "train/loss", "train/reference_k3")


def win_rate(trained: Sequence[Trajectory], first: Sequence[Trajectory]) -> float:
    """Over tasks in the same order; a rollout without a reward counts as 0."""
    rewards = [(ours.reward or 0.0, theirs.reward or 0.0) for ours, theirs in zip(trained, first, strict=True)]
    return sum((ours > theirs) + (ours == theirs) / 2 for ours, theirs in rewards) / len(rewards)


def show(step: int, metrics: Metrics) -> None:
    """A line every ten steps."""
    if step % 10 == 9:
        print(step + 1, *(f"{name} {metrics.get(name) or 0:.3g}" for name in SHOWN), sep="  ", flush=True)


async def main(arguments: argparse.Namespace) -> None:
    """Warm up, evaluate, train, evaluate."""
    started = time.perf_counter()
    tools = tool_schemas()
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, seed=arguments.seed)
    warm_up(model, tokenizer, Teacher(tokenizer, tools), WarmUpConfig(), seed=arguments.seed)
    optimizer = OptimizerConfig(learning_rate=arguments.learning_rate, betas=(0.9, 0.99), warmup_updates=10)
    trainer = Trainer(
        model,
        TrainerConfig(
            optimizer=optimizer,
            dpo=DpoConfig(beta=arguments.beta),
            num_minibatches=arguments.num_minibatches,
            seed=arguments.seed,
        ),
        objective=OnlineDpo(pairs=PAIRS[arguments.pairs]),
        reference=copy.deepcopy(model),
    )
    engine = TransformersEngine(copy.deepcopy(model), config=TransformersEngineConfig())
    stack = Stack(engine=engine, renderer=TemplateRenderer(tokenizer))
    rng = random.Random(arguments.seed + 1)
    config, display = DemoConfig(seed=arguments.seed), Display()
    print(f"warm-up {time.perf_counter() - started:.0f} s", flush=True)

    async def collect() -> list[TrajectoryGroup]:
        tasks = [LookupTask.draw(rng) for _ in range(arguments.tasks_per_step)]
        return await asyncio.gather(*(stack.group(task, arguments.group_size) for task in tasks))

    first = await evaluate(stack, config, display, stage="before")
    with tempfile.TemporaryDirectory() as folder, MetricsWriter(Path(folder)) as metrics:
        await train(
            collect,
            trainer=trainer,
            publisher=InProcessPublisher(engine),
            metrics=metrics,
            config=LoopConfig(num_steps=arguments.num_steps),
            on_step=show,
        )
    trained = await evaluate(stack, config, display, stage="after")
    await engine.close()
    print(
        f"seed {arguments.seed}: success {success(first):.3f} -> {success(trained):.3f}, "
        f"win rate {win_rate(trained, first):.3f}, {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--num-minibatches", type=int, default=2)
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--pairs", choices=PAIRS, default="outside_in")
    asyncio.run(main(parser.parse_args()))
