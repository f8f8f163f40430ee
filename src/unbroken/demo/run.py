"""The demo, top to bottom: make a model, warm it up, train it by GRPO, measure what the usual pipeline would break."""

from __future__ import annotations

import asyncio
import copy
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.demo.comparison import Exact, Retokenized, Rollout, UsualPipeline, compare
from unbroken.demo.model import build_model
from unbroken.demo.progress import Display
from unbroken.demo.report import write_report
from unbroken.demo.result import DemoResult
from unbroken.demo.task import JsonStyle, LookupTask
from unbroken.demo.tokenizer import build_tokenizer
from unbroken.demo.warmup import Teacher, WarmUpConfig, warm_up
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import InvalidInputError
from unbroken.ledger.export import export_samples
from unbroken.messages import ToolSchema
from unbroken.rendering.base import Renderer
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group, run_rollout
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, tool
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams, TrainingSample
from unbroken.weights.in_process import InProcessPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The demo's size; the defaults run in under four minutes on two cores."""

    seed: int = 0
    output: Path = Path("runs/demo")
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    num_steps: int = 50
    tasks_per_step: int = 16
    group_size: int = 8
    num_eval_tasks: int = 256
    """Half of them in each JSON style; the same tasks before and after."""
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        least = {"seed": 0, "num_steps": 1, "tasks_per_step": 1, "group_size": 2, "num_eval_tasks": len(JsonStyle)}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise InvalidInputError(f"{name} must be >= {smallest}, got {getattr(self, name)}")


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


def tool_schemas() -> list[ToolSchema]:
    """The tools of the task as the model sees them, which are the same for every chain."""
    return [lookup_tool(LookupTask.draw(random.Random(0))).schema]


def make_env(task: LookupTask) -> ToolEnv:
    """One episode's environment."""
    return ToolEnv([{"role": "user", "content": task.prompt}], [lookup_tool(task)], task.reward)


async def run_demo(config: DemoConfig, display: Display) -> DemoResult:
    """Run it all, and write the report and the metrics into `config.output`."""
    started = time.perf_counter()
    tools = tool_schemas()
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, seed=config.seed)
    warm_up(model, tokenizer, Teacher(tokenizer, tools), config.warm_up, seed=config.seed, on_step=display.update)

    engine = TransformersEngine(copy.deepcopy(model), config=TransformersEngineConfig())
    stack = Stack(engine=engine, renderer=TemplateRenderer(tokenizer))
    try:
        before = await evaluate(stack, config, display, stage="evaluate before")
        history = await reinforce(model, stack, config, display)
        after = await evaluate(stack, config, display, stage="evaluate after")
        rollouts, exact, retokenized = await measure(after, Trainer(model, TrainerConfig()), stack, tokenizer, tools)
    finally:
        await engine.close()

    shown = choose_example(after, rollouts)
    result = DemoResult(
        seed=config.seed,
        num_parameters=sum(p.numel() for p in model.parameters()),
        success_before=success(before),
        success_after=success(after),
        step_rewards=tuple(metrics["reward/mean"] or 0.0 for metrics in history),
        seconds=time.perf_counter() - started,
        rollouts=config.num_steps * config.tasks_per_step * config.group_size,
        exact=exact,
        retokenized=retokenized,
        counters=total_counts(history),
        example=after[shown],
        example_retokenized=rollouts[shown],
    )
    write_report(result, tokenizer, config.output)
    return result


async def reinforce(model: Any, stack: Stack, config: DemoConfig, display: Display) -> list[Metrics]:
    """Train by GRPO and return what was logged of each step; the engine gets new weights after each."""
    rng = random.Random(config.seed + 1)
    optimizer = OptimizerConfig(learning_rate=config.learning_rate, betas=(0.9, 0.99), warmup_updates=10)
    trainer = Trainer(model, TrainerConfig(optimizer=optimizer, num_minibatches=2, seed=config.seed))
    history: list[Metrics] = []

    async def collect() -> list[TrajectoryGroup]:
        tasks = [LookupTask.draw(rng) for _ in range(config.tasks_per_step)]
        return await asyncio.gather(*(stack.group(task, config.group_size) for task in tasks))

    def on_step(step: int, metrics: Metrics) -> None:
        history.append(metrics)
        note = f"step {step + 1}, reward {metrics['reward/mean']:.2f}"
        display.update("GRPO", (step + 1) / config.num_steps, note)

    shutil.rmtree(config.output / "metrics", ignore_errors=True)
    with MetricsWriter(config.output / "metrics") as metrics:
        await train(
            collect,
            trainer=trainer,
            publisher=InProcessPublisher(stack.engine),
            metrics=metrics,
            config=LoopConfig(num_steps=config.num_steps),
            on_step=on_step,
        )
    return history


async def evaluate(stack: Stack, config: DemoConfig, display: Display, *, stage: str) -> list[Trajectory]:
    """Roll out the evaluation's tasks once each, at temperature 1."""
    rng = random.Random(config.seed + 2)
    styles = list(JsonStyle)
    tasks = [LookupTask.draw(rng, styles[k % len(styles)]) for k in range(config.num_eval_tasks)]
    display.update(stage, 0.0)
    trajectories = await asyncio.gather(*(stack.rollout(task) for task in tasks))
    display.update(stage, 1.0, note=f"success {success(trajectories):.2f}")
    return trajectories


async def measure(
    trajectories: Sequence[Trajectory], trainer: Trainer, stack: Stack, tokenizer: Any, tools: list[ToolSchema]
) -> tuple[list[Rollout], Exact, dict[JsonStyle, Retokenized]]:
    """Compare trainer and sampler on the rollouts as they were sampled, and on what the usual pipeline makes of them.

    The trajectories alternate between the JSON styles.
    """
    rows = [row for trajectory in trajectories for row in export_samples(trajectory.tree, advantage=0.0)]
    differ = [not trains_what_was_sampled(row, t) for row, t in zip(rows, trajectories, strict=True)]
    exact = Exact(share_differ=sum(differ) / len(differ), mismatch=mismatch_of_rows(rows, trainer.logprobs(rows)))
    pipeline = UsualPipeline(tokenizer, stack.renderer, tools)
    rollouts = [pipeline.retokenize(trajectory) for trajectory in trajectories]
    styles = list(JsonStyle)
    retokenized = {style: await compare(rollouts[k :: len(styles)], stack.engine) for k, style in enumerate(styles)}
    return rollouts, exact, retokenized


def trains_what_was_sampled(row: TrainingSample, trajectory: Trajectory) -> bool:
    """Whether the ids a row trains on are those that the engine returned, turn by turn."""
    returned = np.concatenate([turn.sequence.completion_ids for turn in trajectory.turns])
    return np.array_equal(row.token_ids[row.loss_mask], returned)


def total_counts(history: Sequence[Metrics]) -> dict[str, int]:
    """Every event of training, as `event/reason`, over all steps."""
    total: Counter[str] = Counter()
    for metrics in history:
        total.update({name: int(n) for name, n in metrics.items() if name.startswith("counters/") and n})
    by_reason = {name.removeprefix("counters/"): n for name, n in sorted(total.items())}
    return {name: n for name, n in by_reason.items() if "/" in name}


def success(trajectories: Sequence[Trajectory]) -> float:
    """Share of right answers; a rollout without a reward is none."""
    return sum(trajectory.reward or 0.0 for trajectory in trajectories) / len(trajectories)


def choose_example(trajectories: Sequence[Trajectory], rollouts: Sequence[Rollout]) -> int:
    """The index of the rollout to show: changed by the usual pipeline if one is, right, and of many turns."""
    return max(
        range(len(rollouts)),
        key=lambda k: (rollouts[k].differs, trajectories[k].reward or 0.0, len(trajectories[k].turns)),
    )
