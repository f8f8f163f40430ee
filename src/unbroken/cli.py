"""The `unbroken` command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from unbroken import __version__
from unbroken.errors import UnbrokenError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 for success, 1 for an error of ours, 2 for wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UnbrokenError as error:
        print(f"unbroken: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unbroken", description="Token-in, token-out rollouts and RL training.")
    parser.add_argument("--version", action="version", version=f"unbroken {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a tiny tool-using model by GRPO on this machine's CPU")
    demo.add_argument("--seed", type=int, default=0, help="seed of weights, tasks and minibatches (default: 0)")
    demo.add_argument("--steps", type=int, default=None, help="GRPO steps (default: what reaches the plateau)")
    demo.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder to write (default: runs/demo)")
    demo.set_defaults(run=_demo)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from unbroken.demo.progress import Display
        from unbroken.demo.run import DemoConfig, run_demo
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unbroken"):
            raise
        print(f"unbroken: the demo needs the train extra: pip install 'unbroken[train]' ({error})", file=sys.stderr)
        return 1
    options = {"seed": arguments.seed, "output": arguments.output}
    if arguments.steps is not None:
        options["num_steps"] = arguments.steps
    with Display() as display:
        result = asyncio.run(run_demo(DemoConfig(**options), display))
    display.show(result)
    print(f"report: {arguments.output / 'report.html'}")
    return 0
