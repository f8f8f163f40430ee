"""A warm start, then rollouts: a model that can copy learns the demo's task by imitation, then from rewards.

    unbroken train recipes/lookup_supervised.py

The demonstrations are conversations with tool calls, in a file that this recipe writes. Their teacher often guesses too
early, so a model that imitates it perfectly still fails: the rollouts after the warm start teach it not to. The task
is in `src/unbroken/demo/lookup.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unbroken.demo.config import LookupConfig
from unbroken.demo.lookup import LookupTask, answer_text, lookup_problems, tool_schemas
from unbroken.demo.warm import write_warm_model
from unbroken.reports import write_file
from unbroken.runs.config import WarmStartConfig
from unbroken.runs.processes import main_process_first
from unbroken.runs.python_files import DataName
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig

NUM_DEMONSTRATIONS = 1000
GUESS_PROBABILITY = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(LookupConfig):
    """Supervised steps on 16 demonstrations each, then 50 steps of rollouts as in the demo."""

    output: Path = Path("runs/lookup-supervised")
    model: Path = Path("runs/lookup-supervised-model")
    """A folder; a model that can copy words is written there, unless there is one."""
    warm_start: WarmStartConfig | None = field(
        default_factory=lambda: WarmStartConfig(
            data=DataName("runs/lookup-demonstrations.jsonl"), steps=1000, learning_rate=3e-3
        )
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=1050, max_empty_steps=None))


def demonstrate(rng: random.Random) -> dict[str, Any]:
    """A conversation in which a teacher solves a task, or answers with a key that it should have looked up."""
    task = LookupTask.draw(rng)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    answer = None
    for number, key in enumerate(task.keys):
        call = {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": "lookup", "arguments": {"key": key}},
        }
        reply = task.look_up(key)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(reply)})
        answer = reply.get("value") or (reply["next"] if rng.random() < GUESS_PROBABILITY else None)
        if answer is not None:
            break
    messages.append({"role": "assistant", "content": answer_text(str(answer))})
    return {"messages": messages, "tools": tool_schemas()}


def write_inputs(config: Config, data: Path) -> None:
    """Write a model that can copy, and demonstrations, unless they are there."""
    if not config.model.exists():
        write_warm_model(config.model, replace(config.warm_up, num_demo_steps=0), seed=config.seed)
    if not data.exists():
        rng = random.Random(config.seed)
        # Whole or not at all: the next start would train on the half that a kill had left.
        write_file(data, "".join(json.dumps(demonstrate(rng)) + "\n" for _ in range(NUM_DEMONSTRATIONS)))


async def make_task(config: Config) -> Task:
    """Write what is missing, and train on lookups."""
    with main_process_first():
        if config.warm_start is not None:
            await asyncio.to_thread(write_inputs, config, Path(config.warm_start.data))
    return Task(
        model=config.model,
        train_on=lookup_problems("train", config.seed),
        evaluate_on=lookup_problems("evaluation", config.seed),
    )
