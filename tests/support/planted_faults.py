"""Engines whose policy is not the trainer's, by faults that were made: two layers that changed places, a rotary
embedding of another base, an update that did not arrive, another model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.models import random_qwen3
from support.servers import server_tokenizer
from unbroken.engines.base import Engine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.policies import PoliciesConfig
from unbroken.rollout.tool_env import ToolEnv
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import RolloutConfig
from unbroken.runs.policy_check import PolicyCheck
from unbroken.training.config import LoraUpdates, TrainerConfig
from unbroken.training.policies import PolicyTrainers
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams


def make_model(*, seed: int = 0, theta: float = 10_000.0) -> Any:
    """A random Qwen3 of the servers' tokenizer that vLLM takes, whose layers, order and positions matter."""
    return random_qwen3(
        seed=seed,
        vocab_size=len(server_tokenizer()),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def swap_layers(model: Any) -> Any:
    """The same weights, two layers of which have changed places."""
    first, second = model.model.layers
    states = copy.deepcopy(first.state_dict()), copy.deepcopy(second.state_dict())
    first.load_state_dict(states[1])
    second.load_state_dict(states[0])
    return model


FAULTS: dict[str, Callable[[], Any]] = {
    "swapped layers": lambda: swap_layers(make_model()),
    "wrong rope": lambda: make_model(theta=10.0),
    "another model": lambda: make_model(seed=1),
}
"""The model that the engine has; the trainer's is `make_model()`."""


def save_model(folder: Path, model: Any) -> None:
    """Write a model with its tokenizer."""
    model.save_pretrained(folder)
    server_tokenizer().save_pretrained(folder)


def make_check(
    engine: Engine,
    model: Any,
    *,
    max_k3: float,
    version: int = 0,
    temperature: float = 1.0,
    policies: PoliciesConfig | None = None,
) -> PolicyCheck:
    """The check of an engine against a trainer with this model, or of several policies."""

    async def no_reward(messages: Any) -> float:
        return 0.0

    sampler = Sampler(
        engine=engine,
        renderer=TemplateRenderer(server_tokenizer()),
        config=RolloutConfig(sampling=SamplingParams(max_tokens=8, temperature=temperature)),
        problems=Problems(env=lambda number: ToolEnv([{"role": "user", "content": "Hello"}], [], no_reward)),
        seed=(0,),
        policies=policies,
    )
    trainer: Trainer
    if policies is None:
        trainer = Trainer(model, TrainerConfig(), policy_version=version)
    else:
        adapters = TrainerConfig(lora_updates=LoraUpdates.ADAPTER)
        trainer = PolicyTrainers(model, adapters, policies=policies, policy_version=version)
    return PolicyCheck(trainer=trainer, sampler=sampler, max_k3=max_k3)
