"""The demo's task with TRL's GRPOTrainer: TRL trains, unbroken samples the rollouts.

    pip install '.[trl]'
    python recipes/lookup_in_trl.py

Read it from the bottom: a warmed-up model, an engine with a copy of it, and TRL's trainer, which trains on exactly the
ids that were sampled.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from unbroken.demo.config import LookupConfig, WarmUpConfig
from unbroken.demo.lookup import JsonStyle, LookupTask, lookup_env
from unbroken.demo.model import build_model, build_tokenizer, warm_up
from unbroken.engines.transformers import TransformersEngine
from unbroken.integrations.trl import Prompt, RowsByPrompt, env_reward, rollout_func
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.tool_env import ToolEnv


def draw_tasks(num_tasks: int, seed: int) -> Dataset:
    """A data set with a prompt in each row, and the chain, which only the environment sees."""
    rng = random.Random(seed)
    tasks = {task.prompt: task for task in (LookupTask.draw(rng) for _ in range(num_tasks))}
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "keys": list(task.keys),
            "value": task.value,
            "style": task.style.value,
        }
        for prompt, task in tasks.items()
    ]
    return Dataset.from_list(rows)


def make_env(row: Any) -> ToolEnv:
    """The environment of a row's task."""
    return lookup_env(LookupTask(keys=tuple(row["keys"]), value=row["value"], style=JsonStyle(row["style"])))


def train(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    """Train with TRL, and write its log."""
    tasks = draw_tasks(arguments.num_steps * arguments.tasks_per_step, arguments.seed + 1)
    rows = RowsByPrompt(tasks)

    def env_for(prompt: Prompt) -> ToolEnv:
        return make_env(rows[prompt])

    config = GRPOConfig(
        output_dir=str(arguments.output),
        max_steps=arguments.num_steps,
        per_device_train_batch_size=arguments.tasks_per_step * arguments.group_size,
        num_generations=arguments.group_size,
        learning_rate=5e-4,
        adam_beta2=0.99,
        warmup_steps=10,
        lr_scheduler_type="constant_with_warmup",
        bf16=False,
        gradient_checkpointing=False,
        seed=arguments.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    engine = TransformersEngine(copy.deepcopy(model))
    renderer = TemplateRenderer(tokenizer)
    episodes = LookupConfig().rollouts
    with rollout_func(
        env_for, engine=engine, renderer=renderer, sampling=episodes.sampling, limits=episodes.limits
    ) as rollouts:
        trainer = GRPOTrainer(
            model,
            env_reward,
            args=config,
            train_dataset=tasks,
            processing_class=tokenizer,
            rollout_func=rollouts,
        )
        trainer.train()
    lines = (json.dumps(entry) for entry in trainer.state.log_history)
    (arguments.output / "log.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def main(arguments: argparse.Namespace) -> None:
    """Make the model, warm it up, train it."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=arguments.seed)
    warm_up(model, tokenizer, WarmUpConfig(), seed=arguments.seed)
    train(model, tokenizer, arguments)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the defaults are the demo's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/lookup-in-trl"))
    return parser.parse_args(given)


if __name__ == "__main__":
    main(parse_arguments())
