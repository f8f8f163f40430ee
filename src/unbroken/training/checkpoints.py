"""Checkpoints of a training loop, from which a killed run goes on as if it had not been killed.

    checkpoints/step-00000005/    the trainer after 5 steps (state.py), the metrics of the fifth, the caller's state

A checkpoint is written after a step's update and *before* its weights are published, so with a checkpoint for each step
the newest one is never behind the engines. On resume the step's weights are published and its metrics written again,
in place of a line that may be there already: each step is in the metrics once, whenever the run was killed.
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
    """The state of `collect`, such as a position in a data set and a `numpy` generator's `rng.bit_generator.state`."""

    def state(self) -> Mapping[str, Any]:
        """The state after the step that was just trained, in types that JSON can hold."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Set the state to one that `state` returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """The last step that a run has made, before its weights are published."""

    num_steps: int
    """Steps made, at least one; the next step has this number."""
    metrics: Metrics
    groups: Mapping[str, Any] | None = None
    """Which groups of this process were trained (`GroupNumbers.state`), if that does not follow from `num_steps`."""


class Checkpoints:
    """The checkpoints of one run, in a folder that holds nothing else."""

    def __init__(self, folder: Path, *, every: int = 1, num_kept: int = 2, caller: Resumable | None = None) -> None:
        """Save every `every` steps and after the last one, and keep the newest `num_kept`; both are at least 1.

        Engines that outlive the trainer (servers) refuse weights older than theirs, so a run against them can be
        resumed from any point only with `every=1`.
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
        """Whether there is a checkpoint of this step."""
        return num_steps in self._find_folders()

    def save(self, trainer: Trainer, last: LastStep) -> None:
        """Save trainer, caller and last step.

        Raises:
            InvalidInputError: the caller's state does not survive JSON.
            CheckpointError: it cannot be written; earlier checkpoints are unchanged.
        """
        with trainer.fail_together():
            caller = None if self.caller is None else self.caller.state()
        extra: dict[str, Any] = {"num_steps": last.num_steps, "metrics": dict(last.metrics), "caller": caller}
        if last.groups is not None:
            extra["groups"] = last.groups
        trainer.save(self.folder / f"step-{last.num_steps:08}", extra=extra)
        with trainer.fail_together():
            if trainer.is_main_process:
                for _, folder in sorted(self._find_folders().items())[: -self._num_kept]:
                    remove_folder(folder)

    def resume(self, trainer: Trainer) -> LastStep | None:
        """Restore trainer and caller from the newest checkpoint that the first process finds; None without one.

        Raises:
            CheckpointError: the newest is damaged, or was written with another caller or trainer.
        """
        with trainer.fail_together():
            if trainer.is_main_process:
                remove_unfinished(self.folder, "step-")
            found = self._find_folders()
        folder = trainer.from_main_process(found[max(found)] if found else None)
        if folder is None:
            return None
        extra = trainer.load(folder)
        with trainer.fail_together():
            self._restore_caller(extra["caller"], folder)
        return LastStep(num_steps=extra["num_steps"], metrics=extra["metrics"], groups=extra.get("groups"))

    def _restore_caller(self, state: Mapping[str, Any] | None, folder: Path) -> None:
        if (state is None) != (self.caller is None):
            raise CheckpointError(
                f"{folder} was written {'without' if state is None else 'with'} a caller's state: give Checkpoints the "
                "same `caller` as in the run before"
            )
        if self.caller is not None and state is not None:
            self.caller.restore(state)

    def _find_folders(self) -> dict[int, Path]:
        return find_checkpoints(self.folder)


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by the number of steps."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((_STEP_NAME.fullmatch(path.name), path) for path in paths)
    return {int(match[1]): path for match, path in found if match is not None}
