"""A stand-in with the attributes of GRPOTrainer that our rollouts read, and rollouts over a scripted engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from support.fake_renderer import FakeRenderer
from support.rollouts import HELLO, MORE
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.integrations.trl import TrlRollouts, env_reward, rollout_func
from unbroken.rollout.limits import Limits
from unbroken.types import SamplingParams


def stand_in(**changed: Any) -> Any:
    """A trainer before its first step."""
    facts = {
        "accelerator": Accelerator(cpu=True),
        "state": SimpleNamespace(global_step=0),
        "model": torch.nn.Linear(2, 1),
        "processing_class": SimpleNamespace(pad_token_id=0),
        "temperature": 1.0,
        "tools": [],
        "environment_factories": None,
        "reward_funcs": [env_reward],
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
    }
    return SimpleNamespace(**{**facts, **changed})


def make(make_env: Any = lambda _: ScriptedEnv([MORE]), engine: Any = None, **changed: Any) -> TrlRollouts:
    """Rollouts that say hello twice."""
    facts = {"renderer": FakeRenderer(), "sampling": SamplingParams(max_tokens=50), "limits": Limits()}
    return rollout_func(
        make_env, engine=engine or ScriptedEngine(lambda _: HELLO, allow_forks=True), **{**facts, **changed}
    )
