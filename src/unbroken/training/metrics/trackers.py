"""Where metrics go besides their file: TensorBoard, and by name whatever else accelerate has a tracker for.

Accelerate's own way, `Accelerator(log_with=...)`, leaves out trackers whose package is missing without a word, so its
tracker classes are used here directly. They need an `Accelerator` to be there already. TensorBoard is written to
without accelerate, whose tracker cannot make it forget the steps that a run makes again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from torch.utils.tensorboard import SummaryWriter

from unbroken.errors import InvalidInputError


class Tracker(StrEnum):
    """A tracker of accelerate's."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"
    COMET_ML = "comet_ml"
    AIM = "aim"
    CLEARML = "clearml"
    SWANLAB = "swanlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerConfig:
    """Who is told of each step."""

    names: tuple[Tracker, ...] = (Tracker.TENSORBOARD,)
    """None of them: `--trackers.names '[]'`."""
    project: str = "unbroken"
    """What the run is filed under, where a tracker has projects."""
    run_name: str | None = None
    """What W&B calls the run; none: a name of its own making."""

    def __post_init__(self) -> None:
        installed = {tracker.value for tracker in get_available_trackers()}
        missing = [name for name in self.names if name not in installed]
        if missing:
            raise InvalidInputError(
                f"names must be trackers that are installed, and {missing[0]} is not: pip install {missing[0]}"
            )


class Trackers:
    """Told of each step in turn. A run that is gone on with stays one run in TensorBoard and W&B, and begins another in
    the others.
    """

    def __init__(self, config: TrackerConfig, directory: Path, settings: Mapping[str, Any]) -> None:
        """Start them. `settings` are the run's, as JSON can hold them; all but TensorBoard show them beside it."""
        self._config = config
        self._directory = directory
        self._tensorboard = SummaryWriter(str(directory)) if Tracker.TENSORBOARD in config.names else None
        self._others = [self._start(name) for name in config.names if name is not Tracker.TENSORBOARD]
        for tracker in self._others:
            tracker.store_init_configuration(dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell of one step."""
        for tracker in self._others:
            tracker.log(dict(values), step=step)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def cut(self, first_step: int) -> None:
        """TensorBoard forgets `first_step` and later ones. The others cannot: W&B keeps what it has of a step, which is
        the same as what it would be told again.
        """
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = SummaryWriter(str(self._directory), purge_step=first_step)

    def close(self) -> None:
        """End them. Idempotent."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        while self._others:
            self._others.pop().finish()

    def _start(self, name: Tracker) -> GeneralTracker:
        kind = LOGGER_TYPE_TO_CLASS[name.value]
        folder = [str(self._directory)] if kind.requires_logging_directory else []
        options: dict[str, Any] = {}
        if name is Tracker.WANDB:
            options = {
                "id": self._run_id(),
                "resume": "allow",
                "name": self._config.run_name,
                "dir": str(self._directory),
            }
        tracker = kind(self._config.project, *folder, **options)
        tracker.start()
        return tracker

    def _run_id(self) -> str:
        """The same whenever the run is started."""
        path = self._directory / "run_id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex, "utf-8")
        return path.read_text("utf-8")
