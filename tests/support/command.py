"""The `unbroken` command with everything imported, for `support.forks`; it writes its process id to be killed by."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import unbroken.engines.http
import unbroken.engines.transformers
import unbroken.runs.recipe
import unbroken.runs.reinforce
import unbroken.server.serve
import unbroken.weights.disk  # noqa: F401
from unbroken.cli import main


def run(*, arguments: list[str], pid_file: str) -> None:
    """Run the command line, and exit with its status if that is not 0."""
    torch.set_num_threads(1)
    Path(pid_file).write_text(str(os.getpid()))
    status = main(arguments)
    if status:
        sys.exit(status)
