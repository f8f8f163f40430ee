"""The chain of `recipes/`: a warm start, then RL, then distillation into half the width, in processes that may kill
themselves at a named point.

Both commands are those that a user gives, with small sizes. The chain is started again after each kill as a user would:
the same two commands, of which the second is not begun before the first has ended well.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from transformers import PreTrainedModel

from support import forks
from unbroken.cli import main
from unbroken.engines.transformers import TransformersEngine
from unbroken.runs.export.kept import KeptModels
from unbroken.training.backend import TrainerBackend
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.trainer import Trainer
from unbroken.weights import folders
from unbroken.weights.base import InProcessPublisher

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = ("lookup_supervised.py", "lookup_half.py")
OUTPUTS = ("runs/lookup-supervised", "runs/lookup-half")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL to the process of a command of the chain, at the `count`-th time that it comes to a point."""

    command: int
    point: str
    count: int = 1


def _after(call: Callable[..., Any], reach: Callable[[], None]) -> Callable[..., Any]:
    def replaced(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        reach()
        return result

    return replaced


def _before(call: Callable[..., Any], reach: Callable[[], None]) -> Callable[..., Any]:
    def replaced(*arguments: Any, **options: Any) -> Any:
        reach()
        return call(*arguments, **options)

    return replaced


def _half_text(call: Callable[..., Any], reach: Callable[[], None]) -> Callable[..., Any]:
    def replaced(path: Path, text: str, **options: Any) -> Any:
        if "demonstrations" in path.name:
            call(path, text[: len(text) // 2], **options)
            reach()
        return call(path, text, **options)

    return replaced


def _half_line(call: Callable[..., Any], reach: Callable[[], None]) -> Callable[..., Any]:
    def replaced(writer: Any, line: str) -> None:
        call(writer, line[: len(line) // 2])
        reach()
        call(writer, line[len(line) // 2 :])

    return replaced


POINTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "model": (PreTrainedModel, "save_pretrained", _after),  # written, and not yet under its name
    "demonstrations": (Path, "write_text", _half_text),
    "start": (Trainer, "__init__", _after),
    "sample": (TransformersEngine, "sample", _before),
    "teacher": (TrainerBackend, "teacher_logprobs", _after),
    "update": (TrainerBackend, "optimizer_step", _before),  # there is a gradient
    "write": (FileSystemWriter, "write_data", _after),  # the tensors of a checkpoint, and not yet its name
    "finish": (FileSystemWriter, "finish", _after),
    "publish": (InProcessPublisher, "publish", _before),
    "metrics": (MetricsWriter, "_append", _half_line),
    "rename": (folders, "complete_folder", _before),  # of a model's folder
    "end": (KeptModels, "write_final", _after),
}
"""Where a process can end, and how that is told: of whom, which function, and when in its call."""


def train(*, folder: str, words: list[str], kill: Kill | None) -> None:
    """Give a command of the chain in a folder, in a process of its own."""
    os.chdir(folder)
    if kill is not None:
        counts = iter(range(1, kill.count + 1))
        owner, name, change = POINTS[kill.point]

        def reach() -> None:
            if next(counts, None) == kill.count:
                print(f"killed: {kill}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, change(getattr(owner, name), reach))
    with Path(folder, "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = main(words)
    os._exit(status)


def run_chain(folder: Path, options: tuple[list[str], list[str]], kill: Kill | None = None) -> int:
    """Start the chain, or start it again; the exit status of the command that ended it."""
    folder.mkdir(exist_ok=True)
    for number, (recipe, more) in enumerate(zip(COMMANDS, options, strict=True)):
        words = ["train", str(RECIPES / recipe), *more]
        at = kill if kill is not None and kill.command == number else None
        if status := forks.call(train, folder=str(folder), words=words, kill=at):
            return status
    return 0
