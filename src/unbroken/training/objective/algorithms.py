"""Advantages and whole algorithms by name, for the command line. See docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.training.loss_config import LossNormalization
from unbroken.training.objective.advantages import (
    StepAdvantages,
    batch_scaled_grpo,
    dr_grpo_advantages,
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
)
from unbroken.training.objective.comparison import Advantages
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.turn_advantages import TurnAdvantages, turn_grpo, turn_returns

ADVANTAGES: Mapping[str, Advantages] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "batch_scaled_grpo": StepAdvantages(batch_scaled_grpo),
    "reinforce_plus_plus": StepAdvantages(reinforce_plus_plus, compares_groups=True),
    "reinforce_plus_plus_baseline": StepAdvantages(reinforce_plus_plus_baseline),
    "turn_grpo": TurnAdvantages(turn_grpo),
    "turn_returns": TurnAdvantages(turn_returns),
}
"""The names of `unbroken train --advantages`."""


def _combine(advantages: str, loss: str, normalization: LossNormalization) -> PolicyGradient:
    return PolicyGradient(ADVANTAGES[advantages], LOSSES[loss], normalization)


ALGORITHMS: Mapping[str, PolicyGradient] = {
    "grpo": _combine("grpo", "clipped", LossNormalization.TOKEN),
    "dr_grpo": _combine("dr_grpo", "clipped", LossNormalization.CONSTANT),
    "dapo": _combine("grpo", "clipped", LossNormalization.TOKEN),
    "rloo": _combine("rloo", "clipped", LossNormalization.TOKEN),
    "reinforce_plus_plus": _combine("reinforce_plus_plus", "clipped", LossNormalization.TOKEN),
    "reinforce_plus_plus_baseline": _combine("reinforce_plus_plus_baseline", "clipped", LossNormalization.TOKEN),
    "gspo": _combine("grpo", "gspo", LossNormalization.SEQUENCE),
    "gspo_token": _combine("grpo", "gspo_token", LossNormalization.SEQUENCE),
    "cispo": _combine("grpo", "cispo", LossNormalization.TOKEN),
    "sapo": _combine("grpo", "sapo", LossNormalization.SEQUENCE),
}
"""What a name of `unbroken train --algorithm` stands for, except online DPO: advantages, a loss, a normalization."""
