"""The command `unbroken train RECIPE`, or `unbroken train --env NAME` for the built-in recipe."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    try:
        from unbroken.runs.help import format_help
        from unbroken.runs.recipe import run_recipe
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unbroken"):
            raise
        print(f"unbroken: training needs the train extra: pip install 'unbroken[train]' ({error})", file=sys.stderr)
        return 1
    if not (arguments.recipe or arguments.env):
        arguments.parser.error("a RECIPE or --env NAME must be given")
    options = arguments.options
    if arguments.env:
        options = ["--environment", *arguments.env]
    try:
        options = split_agent(options)
    except ValueError as error:
        arguments.parser.error(f"--agent must be a command as in a shell: {error}")
    if {"-h", "--help"} & set(options):
        print_text(format_help(arguments.recipe))
        return 0
    return run_command(
        lambda: run_recipe(arguments.recipe, options),
        advice="the same command continues from the last checkpoint",
    )


def split_agent(options: Sequence[str]) -> list[str]:
    """Write `--agent "PROGRAM WORD ..."`, a command as in a shell, as the option `--agent.command`, a list of words.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    words: list[str] = []
    rest = iter(options)
    for option in rest:
        name, equals, text = option.partition("=")
        if name != "--agent":
            words.append(option)
            continue
        command = text if equals else next(rest, "")
        words += ["--agent.command", json.dumps(shlex.split(command), ensure_ascii=False)]
    return words


def print_text(text: str) -> None:
    """Print; a reader that closes the pipe early, such as `--help | head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
