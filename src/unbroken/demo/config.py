"""The settings of a run on the lookup task, which the demo and `recipes/lookup.py` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unbroken.demo.warm_up import WarmUpConfig
from unbroken.rollout.limits import Limits
from unbroken.runs.config import EvaluationConfig, RolloutConfig, RunConfig
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupConfig(RunConfig):
    """With the defaults, 50 steps of 16 tasks take about a minute and a half on two cores. Steps without a row to train
    end no run: the task can be solved.
    """

    output: Path = Path("runs/demo")
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            sampling=SamplingParams(max_tokens=40), limits=Limits(max_turns=6, timeout_s=120.0)
        )
    )
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=5e-4, betas=(0.9, 0.99), warmup_updates=10), num_minibatches=2
        )
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=50, max_empty_steps=None))
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(num_problems=256))
