"""Checkpoints of a training loop, so that a run that was killed goes on as if it had not been.

    checkpoints/step-00000005/    the trainer after 5 steps (state.py), what was logged of the fifth, the caller's state

A checkpoint is written after a step's update and *before* its weights are published, so the newest one is never behind
the engines when there is one for each step. On resume the step's weights are published (again), and its line of metrics
is written (again) in the place of any that is there: each step stands in the metrics once, whenever the run was killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.training.metrics.writer import Metrics
from unbroken.training.trainer import Trainer
from unbroken.weights.folders import remove_folder, remove_unfinished

_STEP_NAME = re.compile(r"step-(\d{8,})")


class Resumable(Protocol):
    """What `collect` needs to go on: a random generator, a place in a data set. `numpy`'s generators go in as they are:
    `{"rng": rng.bit_generator.state}`.
    """

    def state(self) -> Mapping[str, Any]:
        """What JSON can hold, as it is after the step that was just trained on."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Become what `state` was called on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a run goes on."""

    num_steps: int
    """Steps made, at least one; the next has this number."""
    metrics: Metrics
    """What is to be logged of the last of them."""


class Checkpoints:
    """Writes and finds the checkpoints of one run in a folder of its own."""

    def __init__(self, folder: Path, *, every: int = 1, num_kept: int = 2, caller: Resumable | None = None) -> None:
        """Keep the newest `num_kept` of the checkpoints taken every `every` steps and after the last one.

        Engines that outlive the trainer (a server) refuse weights older than theirs, so a run against them resumes
        from every point only with `every=1`.

        Raises:
            InvalidInputError: a number is below 1.
        """
        for name, value in (("every", every), ("num_kept", num_kept)):
            if value < 1:
                raise InvalidInputError(f"Checkpoints.{name} must be at least 1, got {value}")
        self.folder = folder
        self.caller = caller
        self._every = every
        self._num_kept = num_kept

    def is_due(self, num_steps: int, *, last: int) -> bool:
        """Whether to save after `num_steps` of `last` steps."""
        return num_steps % self._every == 0 or num_steps == last

    def holds(self, num_steps: int) -> bool:
        """Whether there is one of `num_steps` steps."""
        return num_steps in self._whole()

    def save(self, trainer: Trainer, *, num_steps: int, metrics: Metrics) -> None:
        """Save trainer and caller after `num_steps` steps, with what is to be logged of the last one.

        Raises:
            InvalidInputError: the caller's state is not what JSON gives back.
            CheckpointError: it cannot be written; earlier checkpoints are as they were.
        """
        caller = None if self.caller is None else self.caller.state()
        extra = {"num_steps": num_steps, "metrics": dict(metrics), "caller": caller}
        trainer.save(self.folder / f"step-{num_steps:08}", extra=extra)
        if trainer.is_main_process:
            for _, folder in sorted(self._whole().items())[: -self._num_kept]:
                remove_folder(folder)

    def resume(self, trainer: Trainer) -> Resumed | None:
        """Bring trainer and caller to the newest checkpoint that the first process finds; None if there is none yet.

        Raises:
            CheckpointError: the newest is not what was written, or was taken with another caller or trainer.
        """
        if trainer.is_main_process:
            remove_unfinished(self.folder, "step-")
        found = self._whole()
        folder = trainer.from_main_process(found[max(found)] if found else None)
        if folder is None:
            return None
        extra = trainer.load(folder)
        if (extra["caller"] is None) != (self.caller is None):
            raise CheckpointError(
                f"{folder} was taken {'without' if extra['caller'] is None else 'with'} a caller's state: give "
                "Checkpoints the same `caller` as in the run before"
            )
        if self.caller is not None:
            self.caller.restore(extra["caller"])
        return Resumed(num_steps=extra["num_steps"], metrics=extra["metrics"])

    def _whole(self) -> dict[int, Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        found = ((_STEP_NAME.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in found if match is not None}
