"""TRL's real GRPOTrainer on the demo's model, rollouts with our engine, and a record of what it trains on."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.lookup import LookupTask, lookup_tool
from unbroken.demo.model import build_model, build_tokenizer, warm_up
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine
from unbroken.integrations.trl import Prompt, RowsByPrompt, TrlRollouts, env_reward, rollout_func
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams

IGNORED_WARNINGS = ("ignore:You are using 'rollout_func':UserWarning",)
SAMPLING = SamplingParams(max_tokens=40, seed=3)
LIMITS = Limits(max_turns=4)
GROUP_SIZE = 4


@cache
def warmed_up() -> tuple[Any, Any]:
    """A model that writes tool calls, mostly broken ones, and its tokenizer."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    config = WarmUpConfig(max_drill_steps=0, num_demo_steps=40)
    warm_up(model, tokenizer, config, seed=0)
    return model, tokenizer


def dataset(num_rows: int) -> Any:
    """Prompts of tasks, with the fields that an environment needs, as a `datasets.Dataset`."""
    from datasets import Dataset

    rng = random.Random(1)
    tasks = [LookupTask.draw(rng) for _ in range(num_rows)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": task.prompt}], "keys": list(task.keys), "value": task.value}
            for task in tasks
        ]
    )


def share_of_letters(messages: Any) -> float:
    """A reward between 0 and 1 for a model that has hardly learnt anything."""
    text = "".join(str(message["content"] or "") for message in messages if message["role"] == "assistant") or " "
    return sum(map(str.isalpha, text)) / len(text)


def lookups(rows: RowsByPrompt) -> Callable[[Prompt], Env]:
    """The demo's tool over the chain of a prompt's row."""

    def make_env(prompt: Prompt) -> Env:
        row = rows[prompt]
        task = LookupTask(keys=tuple(row["keys"]), value=row["value"], style="compact")
        return ToolEnv(prompt, [lookup_tool(task)], share_of_letters)

    return make_env


@dataclass(slots=True)
class Seen:
    """The rows that TRL trained on, pass by pass, and the rollouts that it got."""

    inputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """TRL's own, of each pass: [B, C]."""
    trajectories: list[list[Trajectory]] = field(default_factory=list)
    """Of each generation."""

    def rows(self) -> Iterator[tuple[list[int], list[int], list[int], list[float], list[float]]]:
        """prompt_ids, completion_ids, loss mask, the sampler's and TRL's logprobs of each row, without its padding."""
        for inputs, logprobs in zip(self.inputs, self.logprobs, strict=True):
            for k in range(len(inputs["prompt_ids"])):
                prompt, real = inputs["prompt_mask"][k].bool(), inputs["completion_mask"][k].bool()
                yield (
                    inputs["prompt_ids"][k][prompt].tolist(),
                    inputs["completion_ids"][k][real].tolist(),
                    inputs["tool_mask"][k][real].tolist(),
                    inputs["sampling_per_token_logps"][k][real].tolist(),
                    logprobs[k][real].tolist(),
                )


@contextmanager
def trl_run(
    folder: Path,
    *,
    make_env: Callable[[Prompt], Env] | None = None,
    engine: Engine | None = None,
    rewards: Any = env_reward,
    sampling: SamplingParams = SAMPLING,
    limits: Limits = LIMITS,
    trainer_options: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[tuple[Any, Seen]]:
    """A trainer with two prompts per generation and four rollouts each, and the record of its rows."""
    model, tokenizer = warmed_up()
    rows = dataset(8)
    sampler = engine or TransformersEngine(copy.deepcopy(model))
    with rollout_func(
        make_env or lookups(RowsByPrompt(rows)),
        engine=sampler,
        renderer=TemplateRenderer(tokenizer),
        sampling=sampling,
        limits=limits,
    ) as rollouts:
        yield _trainer(folder, copy.deepcopy(model), tokenizer, rows, rollouts, rewards, trainer_options or {}, config)


def _trainer(
    folder: Path,
    model: Any,
    tokenizer: Any,
    rows: Any,
    rollouts: TrlRollouts,
    rewards: Any,
    options: dict[str, Any],
    config: dict[str, Any],
) -> tuple[Any, Seen]:
    with warnings.catch_warnings():  # of what TRL imports
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer

    seen = Seen()

    def heard(prompts: Any, trainer: Any) -> Any:
        returned = rollouts(prompts, trainer)
        seen.trajectories.append(returned["trajectory"])
        return returned

    class Watched(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            seen.inputs.append({name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)})
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
            answer = super()._get_per_token_logps_and_entropies(*given, **named)
            if torch.is_grad_enabled():
                seen.logprobs.append(answer[0].detach().clone())
            return answer

    fixed = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2 * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    trainer = Watched(
        model,
        rewards,
        args=GRPOConfig(**{**fixed, **config}),
        train_dataset=rows,
        processing_class=tokenizer,
        rollout_func=heard,
        **options,
    )
    return trainer, seen
