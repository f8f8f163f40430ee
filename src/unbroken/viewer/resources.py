"""Everything that the pages ask for, by its path: the same for the server and for an export.

index                        the runs
run/0                        numbers of run 0, and its steps with rollouts
run/0/step/12                its rollouts, without ids; 12@math: those of the evaluation of the set math after 12 steps
run/0/table/QUERY            the first rollouts of all steps that a query finds, and how many there are; without one all
run/0/step/12/rollout/3      one of them, whole
run/0/step/12/rollout/3/retokenised      what the usual pipeline would have made of it

A gateway's store is a run too: its sessions are the rollouts, and a step is a hundred of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from unbroken import __version__
from unbroken.errors import InvalidInputError, NoStoreError, TemplateError
from unbroken.ledger.store import is_postgres_url
from unbroken.ledger.store.sqlite import DATABASE_FILE
from unbroken.limited_process import LimitedProcess, ProcessLimits
from unbroken.runs.records.files import spread
from unbroken.runs.records.notes import SentNote
from unbroken.tinker.store import TINKER_TABLES
from unbroken.viewer.sources.retokenised import TemplateSource, retokenise_recorded, retokenise_trajectory
from unbroken.viewer.sources.runs import RunReader
from unbroken.viewer.sources.stores import StoreRun, TinkerRun

MAX_RUNS = 4
_PRELOAD = (
    "unbroken.viewer.sources.retokenised",
    "unbroken.rendering.loader",
    "transformers.models.auto.tokenization_auto",
)
_STEP = r"\d{1,12}(?:@[\w%.~-]{1,900})?"
_PATH = re.compile(rf"index|run/(\d{{1,3}})(?:/step/({_STEP})(?:/rollout/(\d{{1,9}})(/retokenised)?)?)?", re.ASCII)
_NOTE = re.compile(rf"run/(\d{{1,3}})/step/({_STEP})/rollout/(\d{{1,9}})/note", re.ASCII)
_TABLE = re.compile(r"run/(\d{1,3})/table(?:/([^/]{0,6000}))?", re.ASCII)
_IMAGE = re.compile(r"run/(\d{1,3})/image/([0-9a-f]{64})", re.ASCII)


Source = RunReader | StoreRun
"""What is shown of a run or store. Their methods raise `LookupError` for what is not there."""


class Resources:
    """What runs hold, by path."""

    def __init__(self, runs: Sequence[Source], *, limits: ProcessLimits | None = None) -> None:
        """Show runs; `limits` are those of the process in which their chat templates run."""
        if not 1 <= len(runs) <= MAX_RUNS:
            raise InvalidInputError(f"RUN must be 1 to {MAX_RUNS} folders or stores, got {len(runs)}")
        self._runs = tuple(runs)
        self._process = LimitedProcess(
            retokenise_recorded, limits or ProcessLimits(timeout_s=60), name="retokenising", preload=_PRELOAD
        )

    def get(self, path: str) -> dict[str, Any]:
        """The object at a path.

        Raises:
            LookupError: it does not exist.
        """
        if (found := _TABLE.fullmatch(path)) and isinstance(reader := self._find_run(int(found[1])), RunReader):
            return reader.read_table(None if found[2] is None else unquote(found[2]))
        match = _PATH.fullmatch(path)
        if match is None:
            raise LookupError(f"there is no {path}")
        run, name, rollout, retokenised = match.groups()
        if run is None:
            return {"version": __version__, "runs": [run.describe() for run in self._runs]}
        reader = self._find_run(int(run))
        if name is None:
            return reader.read_run()
        step = _to_step(name)
        if isinstance(step, str) and not isinstance(reader, RunReader):
            raise LookupError(f"there is no {path}")
        if rollout is None:
            return reader.read_step(step)
        shown = reader.read_trajectory(step, int(rollout))
        return shown if retokenised is None else self._retokenise(shown, reader.find_template(shown))

    def get_image(self, path: str) -> bytes:
        """The image file at a path `run/0/image/SHA256`.

        Raises:
            LookupError: it does not exist.
        """
        match = _IMAGE.fullmatch(path)
        if match is None:
            raise LookupError(f"there is no image {path}")
        return self._find_run(int(match[1])).read_image(match[2])

    def write_note(self, path: str, body: bytes) -> dict[str, Any]:
        """Save a note, a `SentNote` as JSON, at `run/0/step/12/rollout/3/note`; returns what is shown of it.

        Raises:
            ChangedNoteError: the rollout or its note is another than the one that was shown.
            LookupError: there is no such rollout; sessions of a store have no notes.
            InvalidInputError: the note is not as it must be.
            MetricsError: the run's folder cannot be written.
        """
        match = _NOTE.fullmatch(path)
        reader = None if match is None else self._find_run(int(match[1]))
        if match is None or not isinstance(reader, RunReader):
            raise LookupError(f"there is no {path[:200]} to be written")
        return reader.write_note(_to_step(match[2]), int(match[3]), SentNote.parse(body))

    def list_paths(self, *, max_rollouts: int = sys.maxsize) -> Iterator[str]:
        """The paths of all objects, but of each run only so many rollouts, evenly spread over its steps."""
        yield "index"
        for number, run in enumerate(self._runs):
            yield f"run/{number}"
            if isinstance(run, RunReader):
                yield f"run/{number}/table"
            steps: Sequence[Any] = run.list_steps()
            quota = max(1, max_rollouts // max(1, len(steps)))
            for step in steps:
                try:
                    listed = run.read_step(step)["trajectories"]
                except LookupError:  # it was deleted since the list was read
                    continue
                yield f"run/{number}/step/{step}"
                for each in spread(listed, quota):
                    rollout = f"run/{number}/step/{step}/rollout/{each['index']}"
                    yield from (rollout, f"{rollout}/retokenised")

    def list_images(self) -> Iterator[str]:
        """The paths of all images."""
        for number, run in enumerate(self._runs):
            yield from (f"run/{number}/image/{sha256}" for sha256 in run.list_images())

    def _retokenise(self, shown: dict[str, Any], source: TemplateSource | None) -> dict[str, Any]:
        if source is None:
            return retokenise_trajectory(shown, None)
        try:
            return self._process.call(shown, source)
        except TemplateError as error:
            return {"problem": str(error)}

    def _find_run(self, number: int) -> Source:
        if number >= len(self._runs):
            raise LookupError(f"there is no run {number}")
        return self._runs[number]


def _to_step(name: str) -> Any:
    return name if "@" in name else int(name)


def open_runs(
    locations: Sequence[str | Path], *, tokenizer: Path | None = None, limits: ProcessLimits | None = None
) -> Resources:
    """Open runs by their folders, and stores by their folders or URLs; `limits` as in `Resources`.

    Raises:
        InvalidInputError: one is neither, or there are too many.
        StoreError: a store cannot be read.
    """
    places = [place for location in locations for place in _expand(str(location))]
    names = [_find_name(place) for place in places]
    unique = [
        name if names.count(name) == 1 else f"{name} {number}" if is_postgres_url(place) else place
        for number, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    sources = [source for place, name in zip(places, unique, strict=True) for source in _open(place, name, tokenizer)]
    return Resources(sources, limits=limits)


def _expand(place: str) -> list[str]:
    """A place, or of `unbroken eval` on several models the folder of each."""
    folder = Path(place)
    is_report = not is_postgres_url(place) and (folder / "report.json").is_file()
    inside = folder.glob("*/evaluation.jsonl") if is_report and not (folder / "evaluation.jsonl").exists() else ()
    return sorted(str(each.parent) for each in inside if not each.parent.is_symlink()) or [place]


def _find_name(place: str) -> str:
    """The last part of a folder's path; nothing of a URL, which may have a password."""
    return "sessions" if is_postgres_url(place) else Path(place).resolve().name


def _open(place: str, name: str, tokenizer: Path | None) -> list[Source]:
    """A run, or the stores at a place, which may be a gateway's and a Tinker server's."""
    files: dict[str, type[StoreRun]] = {DATABASE_FILE: StoreRun, TINKER_TABLES.file: TinkerRun}
    if not is_postgres_url(place):
        kinds = [kind for file, kind in files.items() if (Path(place) / file).is_file()]
        return [kind(place, name=name, tokenizer=tokenizer) for kind in kinds] or [
            RunReader(Path(place), name=name, tokenizer=tokenizer)
        ]
    found: list[Source] = []
    for kind in files.values():
        try:
            found.append(kind(place, name=name, tokenizer=tokenizer))
        except NoStoreError:
            if kind is TinkerRun and not found:
                raise
    return found
