"""Distil into half the width: a small student imitates, then learns from a model that was trained on the demo's task.

    unbroken train recipes/lookup_supervised.py &&   # the teacher: a warm start by demonstrations, then rewards
    unbroken train recipes/lookup_half.py            # the student: the same demonstrations, then its teacher alone

Killed anywhere, the same two lines continue.
The student has the teacher's tokenizer and layers of half the width, so a third of its weights. On-policy distillation
teaches only what a student samples now and then: a random one is warmed up first, here by a drill in copying and by
`warm_start`. The task is in `src/unbroken/demo/lookup.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unbroken.demo.config import LookupConfig, WarmUpConfig
from unbroken.demo.lookup import lookup_problems
from unbroken.errors import InvalidInputError
from unbroken.runs.algorithms import Algorithm
from unbroken.runs.config import TeacherConfig, WarmStartConfig
from unbroken.runs.processes import main_process_first
from unbroken.runs.python_files import DataName, ModelName
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(LookupConfig):
    """The settings of `lookup_supervised.py`, with a teacher in the place of the rewards."""

    output: Path = Path("runs/lookup-half")
    model: Path = Path("runs/lookup-half-model")
    """A folder; a student that can copy words is written there, unless there is one."""
    algorithm: Algorithm = Algorithm.DISTILLATION
    teacher: TeacherConfig | None = field(
        default_factory=lambda: TeacherConfig(models=(ModelName("runs/lookup-supervised/final"),))
    )
    warm_up: WarmUpConfig = field(default_factory=lambda: WarmUpConfig(num_demo_steps=0, max_drill_steps=1500))
    """The drill alone: a narrow model takes more steps to learn it."""
    warm_start: WarmStartConfig | None = field(
        default_factory=lambda: WarmStartConfig(
            data=DataName("runs/lookup-demonstrations.jsonl"), steps=1000, learning_rate=3e-3
        )
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=1050, max_empty_steps=None))


def build_student(teacher: Path, *, seed: int) -> Any:
    """Build a model like a teacher's with random weights, whose layers are half as wide."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(teacher)
    for name in ("hidden_size", "intermediate_size", "head_dim"):  # as many heads, each half as wide
        setattr(config, name, getattr(config, name) // 2)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_student(config: Config, teacher: Path) -> None:
    """Write a student with the teacher's tokenizer that can copy, unless it is there."""
    from unbroken.demo.model import warm_up  # with torch: once the settings are known to be right
    from unbroken.rendering.loader import load_tokenizer
    from unbroken.weights.folders import atomic_folder

    if config.model.exists():
        return
    model, tokenizer = build_student(teacher, seed=config.seed), load_tokenizer(str(teacher))
    warm_up(model, tokenizer, replace(config.warm_up, num_demo_steps=0), seed=config.seed)
    with atomic_folder(config.model) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)


async def make_task(config: Config) -> Task:
    """Write what is missing, and train on lookups."""
    if config.teacher is None:
        raise InvalidInputError("teacher.models must be given: the student is half of the first one")
    with main_process_first():
        await asyncio.to_thread(write_student, config, Path(config.teacher.models[0]))
    return Task(
        model=config.model,
        train_on=lookup_problems("train", config.seed),
        evaluate_on=lookup_problems("evaluation", config.seed),
    )
