"""The gradient of a trainer's step, read off the update that it makes; a loss for a backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from unbroken.training.config import OptimizerConfig
from unbroken.training.model.batch import Batch
from unbroken.training.model.scores import TokenScores
from unbroken.training.trainer import Trainer

SUBTRACT_GRADIENT = OptimizerConfig(learning_rate=1e6, betas=(0.0, 0.0), eps=1e6, max_grad_norm=math.inf)
"""With no averaging and an eps far above any gradient, AdamW moves a weight by learning rate / eps * gradient."""


def step_gradient(trainer: Trainer, units: Sequence[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Make a step with `SUBTRACT_GRADIENT`; its statistics, and what it subtracted from each weight in float64."""
    before = {name: weight.double().clone() for name, weight in trainer.named_weights()}
    stats = trainer.step(units)
    return stats, {name: before[name] - weight.double() for name, weight in trainer.named_weights()}


def flatten(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient of all weights as one vector."""
    return torch.cat([each.flatten() for each in gradient.values()])


def pull(scores: TokenScores, batch: Batch) -> tuple[torch.Tensor, int]:
    """The plain policy gradient of one pass, and its number of loss tokens."""
    return -(batch.weights_N * batch.advantages_N * scores.logprobs_N).sum(), batch.num_loss_tokens
