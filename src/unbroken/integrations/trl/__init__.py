"""Exact multi-turn rollouts for TRL's GRPOTrainer (docs/trl.md)."""

from unbroken.integrations.trl.rollouts import Prompt, RowsByPrompt, TrlRollouts, rollout_func
from unbroken.integrations.trl.rows import TrlDropReason, drop_reason, env_reward, on_trained_rows

__all__ = [
    "Prompt",
    "RowsByPrompt",
    "TrlDropReason",
    "TrlRollouts",
    "drop_reason",
    "env_reward",
    "on_trained_rows",
    "rollout_func",
]
