"""The command `unbroken train RECIPE`, or `unbroken train --env NAME` for the built-in recipe."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from unbroken.errors import missing_extra
from unbroken.runs.signals import run_command


def add_train_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    train = commands.add_parser(
        "train",
        help="train with a recipe: a Python file, or a TOML file with values for one; or on an environment",
        description="Train with a recipe, or on an environment. `unbroken train RECIPE --help` and "
        "`unbroken train --env NAME --help` list all settings.",
        allow_abbrev=False,
    )
    train.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="a Python or TOML file")
    train.add_argument(
        "--env",
        nargs=argparse.REMAINDER,
        metavar="NAME",
        help="instead of a recipe: an environment, file.py:Class, module:Class, verifiers:NAME or harbor:FOLDER, then "
        "options",
    )
    train.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="--FIELD VALUE", help="e.g. --trainer.optimizer.learning-rate 3e-4"
    )
    train.set_defaults(run=run_train, parser=train)


def run_train(arguments: argparse.Namespace) -> int:
    """Run the recipe, or print its help; returns the exit status."""
    if not (arguments.recipe or arguments.env):
        arguments.parser.error("a RECIPE or --env NAME must be given")
    options = arguments.options
    if arguments.env:
        options = ["--environment", *arguments.env]
    try:
        from unbroken.runs.recipe import load_recipe, run_recipe
        from unbroken.runs.settings import format_help

        if {"-h", "--help"} & set(options):
            recipe = load_recipe(arguments.recipe)
            command = f"unbroken train {arguments.recipe or '--env NAME'}"
            _print_text(format_help(recipe.section, recipe.values, command=command, doc=recipe.doc))
            return 0
        return run_command(
            lambda: run_recipe(arguments.recipe, options),
            advice="the same command continues from the last checkpoint",
        )
    except ModuleNotFoundError as error:  # of the user's own modules it is another error
        raise missing_extra(error, "training needs the train extra", "train") from error


def _print_text(text: str) -> None:
    """Print; a reader that closes the pipe early, such as `--help | head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
