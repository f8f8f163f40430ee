"""The demo, top to bottom: make a model, warm it up, train it by GRPO, and measure what the usual pipeline would break."""

from __future__ import annotations

import copy
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.counters import Counters
from unbroken.demo.comparison import Retokenized, Rollout, UsualPipeline, compare
from unbroken.demo.model import build_model
from unbroken.demo.progress import Display
from unbroken.demo.report import write_report
from unbroken.demo.result import DemoResult
from unbroken.demo.task import JsonStyle, LookupTask
from unbroken.demo.tokenizer import build_tokenizer
from unbroken.demo.warmup import Teacher, WarmUpConfig, warm_up
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.ledger.export import export_samples
from unbroken.messages import ToolSchema
from unbroken.rendering.base import Renderer
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import ToolEnv
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group, run_rollout
from unbroken.rollout.tools import Tool, tool
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.advantages import grpo_advantages
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.metrics import MetricsWriter
from unbroken.training.mismatch import Mismatch, mismatch
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams
from unbroken.weights.in_process import InProcessPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The demo's size; the defaults run in under four minutes on two cores."""

    seed: int = 0
    output: Path = Path("runs/demo")
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    num_steps: int = 40
    tasks_per_step: int = 16
    group_size: int = 8
    num_eval_tasks: int = 256
    """Half of them in each JSON style; the same tasks before and after."""
    learning_rate: float = 5e-4


SAMPLING = SamplingParams(max_tokens=40)
LIMITS = Limits(max_turns=6, timeout_s=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What every rollout of the demo needs."""

    engine: Engine
    renderer: Renderer

    async def rollout(self, task: LookupTask) -> Trajectory:
        """One episode."""
        return await run_rollout(
            make_env(task), engine=self.engine, renderer=self.renderer, sampling=SAMPLING, limits=LIMITS
        )

    async def group(self, task: LookupTask, group_size: int) -> TrajectoryGroup:
        """`group_size` episodes of one task, all at once."""
        return await run_group(
            lambda: make_env(task),
            group_size,
            engine=self.engine,
            renderer=self.renderer,
            sampling=SAMPLING,
            limits=LIMITS,
        )


def lookup_tool(task: LookupTask) -> Tool:
    """The one tool of the task."""

    @tool
    async def lookup(key: str) -> dict[str, str]:
        """Look up a key.

        Args:
            key: The key.
        """
        return task.look_up(key)

    return lookup


def make_env(task: LookupTask) -> ToolEnv:
    """One episode's environment."""
    return ToolEnv([{"role": "user", "content": task.prompt}], [lookup_tool(task)], task.reward)


async def run_demo(config: DemoConfig, display: Display) -> DemoResult:
    """Run it all, and write the report and the metrics into `config.output`."""
    started = time.perf_counter()
    tools = [lookup_tool(LookupTask.draw(random.Random(0))).schema]
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, seed=config.seed)
    warm_up(model, tokenizer, Teacher(tokenizer, tools), config.warm_up, seed=config.seed, on_step=display.update)

    engine = TransformersEngine(copy.deepcopy(model), config=TransformersEngineConfig())
    stack = Stack(engine=engine, renderer=TemplateRenderer(tokenizer))
    try:
        before = await evaluate(stack, config, display, stage="evaluate before")
        step_rewards, counters = await reinforce(model, stack, config, display)
        after = await evaluate(stack, config, display, stage="evaluate after")
        rollouts, exact, retokenized = await measure(after, Trainer(model, TrainerConfig()), stack, tokenizer, tools)
    finally:
        await engine.close()

    for trajectory in (*before, *after):
        counters.merge(trajectory.counters)
    shown = choose_example(after, rollouts)
    result = DemoResult(
        seed=config.seed,
        num_parameters=sum(p.numel() for p in model.parameters()),
        success_before=success(before),
        success_after=success(after),
        step_rewards=tuple(step_rewards),
        seconds=time.perf_counter() - started,
        rollouts=config.num_steps * config.tasks_per_step * config.group_size,
        exact=exact,
        retokenized=retokenized,
        counters=counters.as_dict(),
        example=after[shown],
        example_retokenized=rollouts[shown],
    )
    write_report(result, tokenizer, config.output)
    return result


async def reinforce(model: Any, stack: Stack, config: DemoConfig, display: Display) -> tuple[list[float], Counters]:
    """Train by GRPO; the engine gets new weights after each step. Returns each step's mean reward, and all counts."""
    rng = random.Random(config.seed + 1)
    optimizer = OptimizerConfig(learning_rate=config.learning_rate, betas=(0.9, 0.99), warmup_updates=10)
    trainer = Trainer(model, TrainerConfig(optimizer=optimizer, num_minibatches=2, seed=config.seed))
    rewards: list[float] = []
    counters = Counters()

    async def collect() -> list[TrajectoryGroup]:
        tasks = [LookupTask.draw(rng) for _ in range(config.tasks_per_step)]
        groups = await gather_in_order([stack.group(task, config.group_size) for task in tasks])
        rewards.append(float(np.mean([group.rewards for group in groups])))
        display.update("GRPO", len(rewards) / config.num_steps, note=f"step {len(rewards)}, reward {rewards[-1]:.2f}")
        return groups

    with MetricsWriter(config.output) as metrics:
        await train(
            collect,
            trainer=trainer,
            publisher=InProcessPublisher(stack.engine),
            advantages=grpo_advantages,
            metrics=metrics,
            config=LoopConfig(num_steps=config.num_steps),
        )
    return rewards, counters
