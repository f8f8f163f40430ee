"""Everything that the pages ask for, by its path: the same for the server and for an export.

index                        the runs
run/0                        numbers of run 0, and its steps with rollouts
run/0/step/12                its rollouts, without ids
run/0/step/12/rollout/3      one of them, whole
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unbroken import __version__
from unbroken.errors import InvalidInputError
from unbroken.viewer.reading import RunReader

MAX_RUNS = 4
_PATH = re.compile(r"index|run/(\d{1,3})(?:/step/(\d{1,12})(?:/rollout/(\d{1,9}))?)?", re.ASCII)
_IMAGE = re.compile(r"run/(\d{1,3})/image/([0-9a-f]{64})", re.ASCII)


class Resources:
    """What runs hold, by path."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        if not 1 <= len(runs) <= MAX_RUNS:
            raise InvalidInputError(f"RUN must be 1 to {MAX_RUNS} folders, got {len(runs)}")
        self._runs = tuple(runs)

    def get(self, path: str) -> dict[str, Any]:
        """The object at a path.

        Raises:
            LookupError: it does not exist.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise LookupError(f"there is no {path}")
        run, step, rollout = match.groups()
        if run is None:
            return {"version": __version__, "runs": [run.describe() for run in self._runs]}
        reader = self._find_run(int(run))
        if step is None:
            return reader.read_run()
        if rollout is None:
            return reader.read_step(int(step))
        return reader.read_trajectory(int(step), int(rollout))

    def get_image(self, path: str) -> bytes:
        """The image file at a path `run/0/image/SHA256`.

        Raises:
            LookupError: it does not exist.
        """
        match = _IMAGE.fullmatch(path)
        if match is None:
            raise LookupError(f"there is no image {path}")
        return self._find_run(int(match[1])).read_image(match[2])

    def list_paths(self) -> Iterator[str]:
        """The paths of all objects."""
        yield "index"
        for number, run in enumerate(self._runs):
            yield f"run/{number}"
            for files in run.list_steps():
                yield f"run/{number}/step/{files.step}"
                for each in run.read_step(files.step)["trajectories"]:
                    yield f"run/{number}/step/{files.step}/rollout/{each['index']}"

    def list_images(self) -> Iterator[str]:
        """The paths of all images."""
        for number, run in enumerate(self._runs):
            yield from (f"run/{number}/image/{sha256}" for sha256 in run.list_images())

    def _find_run(self, number: int) -> RunReader:
        if number >= len(self._runs):
            raise LookupError(f"there is no run {number}")
        return self._runs[number]


def open_runs(folders: Sequence[Path], *, tokenizer: Path | None = None) -> Resources:
    """Open the folders of runs.

    Raises:
        InvalidInputError: one holds no run, or there are too many.
    """
    names = [folder.resolve().name for folder in folders]
    return Resources(
        [
            RunReader(folder, name=name if names.count(name) == 1 else str(folder), tokenizer=tokenizer)
            for folder, name in zip(folders, names, strict=True)
        ]
    )
