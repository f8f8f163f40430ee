"""The settings of a run on the lookup task, which the demo and `recipes/lookup.py` share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.rollout.limits import Limits
from unbroken.runs.config import EvaluationConfig, RolloutConfig, RunConfig
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpConfig:
    """Supervised training with AdamW: a copy drill, then demonstrations, with a linear decay at the end."""

    learning_rate: float = 3e-3
    """At 5e-3, some seeds unlearn copying during the demonstrations."""
    max_drill_steps: int = 800
    drill_batch_size: int = 32
    drill_loss: float = 0.05
    """The drill ends when a batch's loss falls below this, in nats per token."""
    num_demo_steps: int = 1000
    demo_batch_size: int = 16
    decay_share: float = 0.4
    """The last part of the demonstrations, in which the learning rate decays."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "drill_loss"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise InvalidInputError(f"{name} must be finite and > 0, got {value}")
        for name in ("drill_batch_size", "demo_batch_size"):
            if (value := getattr(self, name)) < 1:
                raise InvalidInputError(f"{name} must be >= 1, got {value}")
        for name in ("max_drill_steps", "num_demo_steps"):
            if (value := getattr(self, name)) < 0:
                raise InvalidInputError(f"{name} must be >= 0, got {value}")
        if not 0 < self.decay_share <= 1:
            raise InvalidInputError(f"decay_share must be in (0, 1], got {self.decay_share}")


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
