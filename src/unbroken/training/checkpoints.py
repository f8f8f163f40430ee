"""Checkpoints of a training loop, from which a killed run continues as if it had not been killed.

    checkpoints/step-00000005/    the trainer after 5 steps (state.py), metrics of the fifth, which groups were trained

After a step's update, each process copies its part of the trainer to the memory of the CPU, which blocks; a thread of
each writes the copy while the next steps are made. On resume the step's weights are published and
its metrics written again, in place of a line that may be there already, and later lines go: each step is in the metrics
once, whenever the run was killed.

Servers may have weights of steps that are lost with a killed run. They take no older version, so the run continues with
a version above theirs (`loop._resume`). The first checkpoint is that of the first step, and is waited for before its
weights are published: without any, new weights of this run could not be distinguished from those of another.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.training.metrics.writer import Metrics
from unbroken.training.trainer import Trainer
from unbroken.weights.folders import remove_folder, remove_unfinished

_logger = logging.getLogger(__name__)
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """The last step that a run has made, before its weights are published."""

    num_steps: int
    """Steps made, at least one; the next step has this number."""
    metrics: Metrics
    groups: Mapping[str, Any] | None = None
    """Which groups of this process were trained, and the choices of their source (`StepGroups.state`). None: the lowest
    numbers, because another number of processes wrote the checkpoint."""


class Checkpoints:
    """The checkpoints of one run, in a folder that holds nothing else."""

    def __init__(
        self,
        folder: Path,
        *,
        every: int = 20,
        every_s: float | None = 600.0,
        num_kept: int = 2,
        source: str = "",
    ) -> None:
        """Save every `every` steps, `every_s` seconds after the one before, after the first step and after the last;
        keep the newest `num_kept`. `source` says which problems the run has: it continues only with the same.
        """
        for name, value in (("every", every), ("num_kept", num_kept)):
            if value < 1:
                raise InvalidInputError(f"Checkpoints.{name} must be at least 1, got {value}")
        self.folder = folder
        self._source = source
        self._every = every
        self._every_s = every_s
        self._num_kept = num_kept
        self._begun_s = time.monotonic()
        """When the newest checkpoint was begun."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._removes_old = False
        """Whether this is the process that removes checkpoints, the first one."""
        self._writing: Future[None] | None = None
        """This process's part of the checkpoint that is being written, or has failed."""

    def is_due(self, num_steps: int, *, last: int) -> bool:
        """Whether to save after `num_steps` of `last` steps; in the first process, whose clock counts."""
        is_late = self._every_s is not None and time.monotonic() - self._begun_s >= self._every_s
        return is_late or num_steps % self._every == 0 or num_steps in (1, last)

    def holds(self, num_steps: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return num_steps in find_checkpoints(self.folder)

    def agree_if_due(self, trainer: Trainer, num_steps: int, *, last: int) -> bool:
        """As `is_due`, the same in all processes; raises as `finish` does if an earlier one could not be written."""
        has_ended = self._writing is not None and self._writing.done()
        is_due, has_ended = trainer.from_main_process((self.is_due(num_steps, last=last), has_ended))
        if has_ended:
            self.finish(trainer)
        return is_due

    def save(self, trainer: Trainer, last: LastStep) -> None:
        """Copy trainer and last step, and begin to write the copy, once an earlier one is written.

        Raises:
            InvalidInputError: what the source of groups has chosen does not survive JSON.
            CheckpointError: the earlier one cannot be written; those before it are unchanged.
        """
        self.finish(trainer)
        num_processes = len(trainer.from_all_processes(None))
        extra: dict[str, Any] = {
            "num_steps": last.num_steps,
            "metrics": dict(last.metrics),
            "source": self._source,
            "num_processes": num_processes,
            "groups": last.groups,
        }
        write = trainer.copy_state(extra=extra)
        self._begun_s, self._removes_old = time.monotonic(), trainer.is_main_process
        self._writing = self._thread.submit(self._write, write, self.folder / f"step-{last.num_steps:08}")
        if last.num_steps == 1:
            self.finish(trainer)

    def save_last(self, trainer: Trainer, last: LastStep | None) -> None:
        """Write a checkpoint of the last step that was made, unless there is one: the run ends."""
        self.finish(trainer)
        if last is not None and not self.holds(last.num_steps):
            self.save(trainer, last)
            self.finish(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Return once everything is written; the error of a checkpoint that cannot be is raised in all processes."""
        writing, self._writing = self._writing, None
        with trainer.fail_together():
            if writing is not None:
                writing.result()

    def close(self) -> None:
        """As `finish`, in this process only and without an error, for a run that ends by another one."""
        if self._writing is not None:
            wait([self._writing])
            if (error := self._writing.exception()) is not None:
                _logger.error("%s", error)

    def resume(self, trainer: Trainer) -> LastStep | None:
        """Restore the trainer from the newest checkpoint that the first process finds; None without one.

        Raises:
            CheckpointError: the newest is damaged, or was written with another trainer or by a run of other problems.
        """
        with trainer.fail_together():
            if trainer.is_main_process:
                remove_unfinished(self.folder, "step-")
            found = find_checkpoints(self.folder)
        folder = trainer.from_main_process(found[max(found)] if found else None)
        if folder is None:
            return None
        extra = trainer.load(folder)
        num_processes = len(trainer.from_all_processes(None))
        with trainer.fail_together():
            self._check_source(extra, folder)
            groups = _find_groups(extra, folder, num_processes=num_processes)
        return LastStep(num_steps=extra["num_steps"], metrics=extra["metrics"], groups=groups)

    def _write(self, write: Callable[[Path], None], folder: Path) -> None:
        write(folder)
        if self._removes_old:
            for _, old in sorted(find_checkpoints(self.folder).items())[: -self._num_kept]:
                remove_folder(old)

    def _check_source(self, extra: Mapping[str, Any], folder: Path) -> None:
        if "source" not in extra:
            raise CheckpointError(
                f"{folder} does not say which problems its run has (`source`): another version of unbroken wrote it, "
                "and this one cannot continue it"
            )
        if extra["source"] != self._source:
            raise CheckpointError(
                f"the run began with {extra['source']!r} and cannot continue with {self._source!r} ({folder}): give it "
                "the same data"
            )


def _find_groups(extra: Mapping[str, Any], folder: Path, *, num_processes: int) -> Mapping[str, Any] | None:
    """Which of this process's groups are trained; None (`LastStep.groups`) if their numbers are of other processes."""
    groups: Mapping[str, Any] | None = extra["groups"]
    saved = extra["num_processes"]
    if groups is None or saved == num_processes:
        return groups
    what = f"{folder} was written by {saved} processes, and is continued by {num_processes}"
    if groups.get("choices") is not None:
        raise CheckpointError(f"{what}: with a curriculum, which chooses problems in each process, start {saved}")
    if groups["beyond"] or groups["num_replaced"]:
        _logger.warning("%s: some problems of the steps around it are trained twice, or not at all", what)
    return None


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by the number of steps."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((_STEP_NAME.fullmatch(path.name), path) for path in paths)
    return {int(match[1]): path for match, path in found if match is not None}
