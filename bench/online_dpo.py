"""Does online DPO raise the win rate of its reward? On the demo's task, against the policy that it began with.

    OMP_NUM_THREADS=1 python bench/online_dpo.py --seed 0

The win rate is the share of tasks on which the trained policy's rollout has a higher reward than the first policy's on
the same task, ties counting half; 0.5 means no change. Both are sampled at temperature 1 with the same seeds, and the
first policy is the reference.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unbroken.demo.config import LookupConfig, WarmUpConfig
from unbroken.demo.lookup import lookup_problems
from unbroken.demo.model import write_warm_model
from unbroken.engines.transformers import TransformersEngine
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.algorithms import Algorithm, Pairing
from unbroken.runs.collector import Sampler
from unbroken.runs.models import load_model
from unbroken.runs.training import train_model
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loss_config import DpoConfig


def win_rate(trained: Sequence[Trajectory], first: Sequence[Trajectory]) -> float:
    """Over tasks in the same order; a rollout without a reward counts as 0."""
    rewards = [(ours.reward or 0.0, theirs.reward or 0.0) for ours, theirs in zip(trained, first, strict=True)]
    return sum((ours > theirs) + (ours == theirs) / 2 for ours, theirs in rewards) / len(rewards)


def make_config(arguments: argparse.Namespace, output: Path) -> LookupConfig:
    """The demo's run, with online DPO."""
    optimizer = OptimizerConfig(learning_rate=arguments.learning_rate, betas=(0.9, 0.99), warmup_updates=10)
    return LookupConfig(
        output=output,
        seed=arguments.seed,
        algorithm=Algorithm.ONLINE_DPO,
        pairs=Pairing(arguments.pairs),
        trainer=TrainerConfig(
            optimizer=optimizer,
            dpo=DpoConfig(beta=arguments.beta),
            num_minibatches=arguments.num_minibatches,
            seed=arguments.seed,
        ),
        loop=LoopConfig(num_steps=arguments.num_steps),
    )


async def main(arguments: argparse.Namespace) -> None:
    """Warm up and train; then sample the evaluation's tasks with the first policy too, and compare."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(arguments, Path(folder))
        model = config.output / "model"
        write_warm_model(model, WarmUpConfig(), seed=config.seed)
        tasks = lookup_problems("evaluation", config.seed)
        train_on = lookup_problems("train", config.seed)
        trained = await train_model(config, model=model, train_on=train_on, evaluate_on=tasks)
        engine = TransformersEngine(load_model(model))
    sampler = Sampler(
        engine=engine, renderer=trained.renderer, config=config.rollouts, problems=tasks, seed=(config.seed, 1)
    )
    groups = await sampler.sample_groups(range(config.evaluation.num_problems), size=1)
    await engine.close()
    first = [trajectory for group in groups for trajectory in group.trajectories]
    print(
        f"seed {config.seed}: win rate {win_rate(trained.rollouts, first):.3f}, {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--num-minibatches", type=int, default=2)
    parser.add_argument("--pairs", choices=[pairing.value for pairing in Pairing], default="outside_in")
    asyncio.run(main(parser.parse_args()))
