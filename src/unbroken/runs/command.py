"""The command `unbroken train RECIPE`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from unbroken.runs.signals import run_command


def add_train_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    train = commands.add_parser(
        "train",
        help="train with a recipe: a Python file, or a TOML file with values for one",
        description="Train with a recipe. `unbroken train RECIPE --help` lists all of its settings.",
        allow_abbrev=False,
    )
    train.add_argument("recipe", type=Path, metavar="RECIPE", help="a Python or TOML file")
    train.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="e.g. --trainer.optimizer.learning-rate 3e-4"
    )
    train.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    """Run the recipe, or print its help; returns the exit status."""
    try:
        from unbroken.runs.help import format_help
        from unbroken.runs.recipe import run_recipe
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unbroken"):
            raise
        print(f"unbroken: training needs the train extra: pip install 'unbroken[train]' ({error})", file=sys.stderr)
        return 1
    if {"-h", "--help"} & set(arguments.options):
        print_text(format_help(arguments.recipe))
        return 0
    return run_command(
        lambda: run_recipe(arguments.recipe, arguments.options),
        advice="the same command continues from the last checkpoint",
    )


def print_text(text: str) -> None:
    """Print; a reader that closes the pipe early, such as `--help | head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
