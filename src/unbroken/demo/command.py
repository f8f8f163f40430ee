"""The commands `unbroken demo`, and `unbroken new`, which writes its task for a user to change."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.progress import show_progress


def add_demo_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    demo = commands.add_parser("demo", help="train a tiny tool-using model by GRPO on this machine's CPU")
    demo.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of weights, tasks and minibatches (default: 0, whose model is in the package)",
    )
    demo.add_argument("--steps", type=int, default=None, help="training steps (default: enough to reach the plateau)")
    demo.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder to write (default: runs/demo)")
    demo.set_defaults(run=_run, advice="; the same command begins anew")


def add_new_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    new = commands.add_parser(
        "new",
        help="write a task to start from: rows, a tool, a reward with its test, settings",
        description="Write a task into a new folder: rows, a tool, a reward with its test, settings, and a README that "
        "says what to change and what to type. It runs as it is, on a CPU in a few minutes.",
        allow_abbrev=False,
    )
    new.add_argument("folder", type=Path, metavar="NAME", help="a folder that is not there yet")
    new.add_argument(
        "--model",
        metavar="MODEL",
        help="a model's folder or a hub's name (default: a tiny one that knows this task)",
    )
    new.set_defaults(run=_run_new, advice="; nothing was written")


def _run_new(arguments: argparse.Namespace) -> int:
    try:
        from unbroken.demo.new import write_task
    except ModuleNotFoundError as error:
        raise missing_extra(error, "a task needs the train extra", "train") from error

    files = write_task(arguments.folder, arguments.model)
    print(f"{arguments.folder}: {', '.join(files)}")
    print(f"next: cd {shlex.quote(str(arguments.folder))} && unbroken train task.toml (then three edits: README.md)")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    try:
        from unbroken.demo.config import LookupConfig
        from unbroken.demo.report import make_report
        from unbroken.demo.run import run_demo
    except ModuleNotFoundError as error:
        raise missing_extra(error, "the demo needs the train extra", "train") from error
    if arguments.steps is not None and arguments.steps < 1:
        raise InvalidInputError(f"--steps must be >= 1, got {arguments.steps}")
    config = LookupConfig(seed=arguments.seed, output=arguments.output)
    config = replace(config, trainer=replace(config.trainer, seed=arguments.seed))
    if arguments.steps is not None:
        config = replace(config, loop=replace(config.loop, num_steps=arguments.steps))

    with show_progress():
        result = asyncio.run(run_demo(config))
    print(make_report(result).to_text(), end="")
    print(f"report: {arguments.output / 'report.html'}")
    return 0
