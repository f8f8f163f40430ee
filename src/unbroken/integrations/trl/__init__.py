"""Exact multi-turn rollouts for TRL's GRPOTrainer (docs/trl.md)."""

from unbroken.integrations.trl.prompts import RowsByPrompt
from unbroken.integrations.trl.rewards import env_reward, on_trained_rows
from unbroken.integrations.trl.rollouts import Prompt, TrlRollouts, rollout_func
from unbroken.integrations.trl.rows import DropReason, drop_reason

__all__ = [
    "DropReason",
    "Prompt",
    "RowsByPrompt",
    "TrlRollouts",
    "drop_reason",
    "env_reward",
    "on_trained_rows",
    "rollout_func",
]
