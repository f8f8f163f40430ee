"""Train the demo's task: follow a chain of lookups with a tool, and say what is at its end.

    unbroken train recipes/lookup.py --algorithm rloo --seed 1 --output runs/lookup-rloo-1

A tiny model is warmed up until it solves about half of the tasks, then trained on rollouts in this process; through a
server, with new weights through files after every step: `unbroken train recipes/lookup_through_server.toml`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.demo.model import build_model
from unbroken.demo.run import make_env, tool_schemas
from unbroken.demo.task import LookupTask
from unbroken.demo.tokenizer import build_tokenizer
from unbroken.demo.warmup import Teacher, WarmUpConfig, warm_up
from unbroken.rollout.limits import Limits
from unbroken.runs.collector import Problems
from unbroken.runs.config import EvaluationConfig, RolloutConfig, RunConfig
from unbroken.runs.processes import main_process_first
from unbroken.runs.progress import StageProgress
from unbroken.runs.reinforce import reinforce
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.types import SamplingParams
from unbroken.weights.folders import atomic_folder

OPTIMIZER = OptimizerConfig(learning_rate=5e-4, betas=(0.9, 0.99), warmup_updates=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """The defaults are the demo's: 50 steps of 16 tasks in about a minute and a half on two cores."""

    output: Path = Path("runs/lookup")
    model: Path | None = None
    """A model that is warmed up already, such as another run's `model` folder; none: make one."""
    num_heads: int = 4
    """Attention heads of the model; 2 makes them as wide as vLLM needs."""
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            sampling=SamplingParams(max_tokens=40), limits=Limits(max_turns=6, timeout_s=120.0)
        )
    )
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(optimizer=OPTIMIZER, num_minibatches=2))
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=50))
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(num_problems=256))


async def run(config: Config) -> None:
    """Warm up a model, once, and train it."""
    model = config.model or config.output / "model"
    with main_process_first():
        if not model.exists():
            write_model(config, model)

    def tasks(name: str) -> Problems:
        return Problems(env=lambda number: make_env(LookupTask.draw(random.Random(f"{config.seed} {name} {number}"))))

    await reinforce(config, model=model, train_on=tasks("train"), evaluate_on=tasks("evaluation"))


def write_model(config: Config, folder: Path) -> None:
    """A model that imitates a hasty teacher, with its tokenizer."""
    tools = tool_schemas()
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, seed=config.seed, num_heads=config.num_heads)
    with StageProgress() as stages:
        teacher = Teacher(tokenizer, tools)
        warm_up(model, tokenizer, teacher, config.warm_up, seed=config.seed, on_step=stages.update)
    with atomic_folder(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
