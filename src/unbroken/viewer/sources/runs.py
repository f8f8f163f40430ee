"""One run's folder, its numbers and its rollouts: read when asked, again when it changed, and never written."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from threading import Lock
from time import time as now_s
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.ledger.store.sqlite import DATABASE_FILE
from unbroken.runs.diagnosis.evidence import METRICS, read_evidence, read_object, read_objects
from unbroken.runs.diagnosis.rules import diagnose
from unbroken.runs.folder import RECIPE_FILE, find_state
from unbroken.runs.process_file import PROCESS_FILE
from unbroken.runs.records.files import FOLDER, find_expected, find_records
from unbroken.runs.records.notes import (
    NOTES_FILE,
    ChangedNoteError,
    Note,
    NoteKey,
    SentNote,
    append_note,
    find_refusal,
    hash_lines,
    read_notes,
)
from unbroken.runs.settings import redact
from unbroken.untrusted import open_inside
from unbroken.viewer.sources.models import Tokenizers, read_recipe
from unbroken.viewer.sources.retokenised import TemplateSource
from unbroken.viewer.sources.rollouts import StepFiles, describe_trajectory, read_pair
from unbroken.viewer.sources.table import Table

_METRICS = Path(*METRICS)
_EVALUATIONS = Path("evaluation.jsonl")
_CLUSTER_STATE, _CLUSTER_EVENTS = Path("cluster") / "state.json", Path("cluster") / "log.jsonl"
_SETS = Path("evaluations")
_SETTLED_S = 2.0
"""A folder that is older has another time if something comes into it."""
_MAX_STEPS = 16
"""Steps whose summaries are kept in memory."""
_MAX_NOTED = 4096
"""Steps with notes whose rollouts are known by their hashes."""
_MAX_IMAGE_BYTES = 100 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class RunReader:
    """Reads the folder of a run, live, finished or dead. Several threads may use it."""

    def __init__(self, folder: Path, *, name: str | None = None, tokenizer: Path | None = None) -> None:
        """Read `folder`; `tokenizer` is a `tokenizer.json`, or a folder with one, in place of the run's own.

        Raises:
            InvalidInputError: the folder holds no run, or `tokenizer` no tokenizer.
        """
        if not any((folder / part).exists() for part in (_METRICS, _EVALUATIONS, FOLDER, _SETS, RECIPE_FILE)):
            raise InvalidInputError(
                "RUN must be the output folder of a run, with metrics/metrics.jsonl or rollouts/, or the store of a "
                f"gateway, with {DATABASE_FILE}, got {folder}{_name_stores(folder)}"
            )
        self.folder = folder
        self.name = name or folder.resolve().name
        self._tokenizers = Tokenizers(tokenizer, run=folder)
        self._summarize: Callable[[StepFiles, object], dict[str, Any]] = lru_cache(_MAX_STEPS)(
            lambda files, _signature: files.make_summary()
        )
        own = weakref.proxy(self)  # no cycle: a reader's open files are closed with it
        self._match_notes: Callable[[StepFiles, object, object], Mapping[int, Note]] = lru_cache(_MAX_NOTED)(
            lambda files, signature, _notes_signature: own._find_notes(files, signature)
        )
        self._table = Table()
        self._notes_lock = Lock()
        self._noted: tuple[object, dict[NoteKey, Note], list[str]] = (None, {}, [])
        """The signature of the file of notes, and what it had."""
        self._listed: tuple[list[Any], Mapping[int | str, StepFiles]] = ([], {})
        """The files, and the times of their folders when they were listed."""

    def describe(self) -> dict[str, Any]:
        """Name, state, and a `revision` that changes when files do."""
        recipe = read_recipe(self.folder)
        return {
            "kind": "run", "name": self.name, "recipe": recipe.name, "model": recipe.model,
            "state": find_state(self.folder), "revision": self._find_revision(),
        }  # fmt: skip

    def read_run(self) -> dict[str, Any]:
        """All numbers of the run, and the steps that have rollouts."""
        lines, problems = _read_numbers(self.folder, *_METRICS.parts)
        evaluations, others = _read_numbers(self.folder, *_EVALUATIONS.parts)
        return {
            **self.describe(), "metrics": _make_columns(lines), "evaluations": evaluations,
            "recorded_steps": self.list_steps(), "settings": redact(read_recipe(self.folder).settings),
            "problems": problems + others + self._read_notes()[1], "cluster": self._read_cluster(),
            "diagnosis": self._diagnose(),
        }  # fmt: skip

    def _diagnose(self) -> list[dict[str, str]]:
        """What is wrong with the run, as `unbroken doctor` says it."""
        return [asdict(each) for each in diagnose(read_evidence(self.folder))]

    def _read_cluster(self) -> dict[str, Any] | None:
        """How the parts of a run on several machines are, and what happened to them; None of another run."""
        state = read_object(self.folder, *_CLUSTER_STATE.parts)
        fields = ("time_s", "parts", "nodes", "versions")
        if state is None or not all(name in state for name in fields):
            return None
        events, _ = _read_numbers(self.folder, *_CLUSTER_EVENTS.parts)
        return {"state": {name: state[name] for name in fields}, "events": events}

    def list_steps(self) -> list[int | str]:
        """The steps of which rollouts were kept, and then the evaluations: STEP@SET."""
        return list(self._list_files())

    def read_table(self, query: str | None) -> dict[str, Any]:
        """What a query finds among all rollouts that were kept; see `Table`."""
        files = {name: (each, [*map(_signature, each.paths)]) for name, each in self._list_files().items()}
        notes = self._read_notes()[0].values()
        places = {(note.set, note.step) for note in notes}
        noted = {name: self._match(each) for name, (each, _) in files.items() if (each.set, each.step) in places}
        found = self._table.query(files, query, noted)
        rows = [each | _show(noted.get(each["step"], {}).get(each["index"])) for each in found["rows"]]
        labels = sorted({label for note in notes for label in note.labels})
        return {**found, "rows": rows, "offers": {**found["offers"], "labels": labels}}

    def read_step(self, step: int | str) -> dict[str, Any]:
        """What there is of a step, without ids.

        Raises:
            LookupError: nothing was kept of it.
        """
        files = self._find_step(step)
        found = self._summarize(files, tuple(map(_signature, files.paths)))
        noted = self._match(files)
        members = [each | _show(noted.get(each["index"])) for each in found["trajectories"]]
        return {**found, "trajectories": members}

    def read_trajectory(self, step: int | str, index: int) -> dict[str, Any]:
        """A rollout with its ids, their texts, and how its parts belong together.

        Raises:
            LookupError: it does not exist.
            InvalidInputError: the file was damaged just now.
        """
        members = self.read_step(step)["trajectories"]
        if index >= len(members):
            raise LookupError(f"step {step} has {len(members)} recorded rollouts, and no number {index}")
        files = self._find_step(step)
        head, record, sha256 = read_pair(files.paths[members[index]["file"]], members[index]["line"])
        note = self._read_notes()[0].get((files.set, files.step, sha256))
        texts = self._tokenizers.find([str(head.get("model"))])
        return {
            **{name: head.get(name) for name in ("rank", "policy_version", "model", "set")},
            "step": step, "index": index, "record": record, "expected": find_expected(record.get("data")),
            "sha256": sha256, **_show(note), "note_time_s": note and note.time_s,
            "note_refusal": find_refusal(self.folder),
            "has_texts": texts is not None, **describe_trajectory(record, texts),
        }  # fmt: skip

    def write_note(self, step: int | str, index: int, sent: SentNote) -> dict[str, Any]:
        """Save labels and a text of a rollout; returns what is shown of them.

        Raises:
            LookupError: there is no such rollout.
            ChangedNoteError: the rollout or its note is another than the one that was shown.
            InvalidInputError: the note is too long.
            MetricsError: the folder cannot be written.
        """
        found, files = self.read_trajectory(step, index), self._find_step(step)
        if found["sha256"] != sent.sha256:
            raise ChangedNoteError("this rollout was made anew: load it again")
        note = Note.of(sent, files.set, files.step, found["record"]["trajectory"])
        append_note(self.folder, note, shown_time_s=sent.shown_time_s)
        is_removed = not (note.labels or note.text)
        return {**_show(note), "note_time_s": None if is_removed else note.time_s}

    def find_template(self, shown: Mapping[str, Any]) -> TemplateSource | None:
        """Where the tokenizer and template of a rollout's model are; None if they are not on this machine."""
        return self._tokenizers.find_template([str(shown["model"])])

    def read_image(self, sha256: str) -> bytes:
        """The file of an image of a rollout.

        Raises:
            LookupError: it does not exist.
        """
        for folder in self._list_folders():
            with suppress(OSError), open_inside(self.folder, *folder.parts, "images", sha256) as file:
                return file.read(_MAX_IMAGE_BYTES)
        raise LookupError(f"the run has no image {sha256}")

    def list_images(self) -> list[str]:
        """The SHA-256 of all images of rollouts."""
        found = (path.name for folder in self._list_folders() for path in (self.folder / folder).glob("images/*"))
        return sorted({name for name in found if _SHA256.fullmatch(name)})

    def _read_notes(self) -> tuple[dict[NoteKey, Note], list[str]]:
        """The notes of the run, read again when their file changed, and what is wrong with some."""
        with self._notes_lock:  # a page asks for several objects at once, and one of them reads the file
            signature = _signature(self.folder / NOTES_FILE)
            if signature != self._noted[0]:
                self._noted = (signature, *read_notes(self.folder))
            return self._noted[1:]

    def _match(self, files: StepFiles) -> Mapping[int, Note]:
        """The notes of a step's rollouts, by their places in its list."""
        self._read_notes()
        return self._match_notes(files, tuple(map(_signature, files.paths)), self._noted[0])

    def _find_notes(self, files: StepFiles, signature: object) -> dict[int, Note]:
        notes = {key: note for key, note in self._read_notes()[0].items() if key[:2] == (files.set, files.step)}
        if not notes:
            return {}
        hashes = [hash_lines(path) for path in files.paths]
        members = self._summarize(files, signature)["trajectories"]
        keys = {
            each["index"]: (files.set, files.step, hashes[each["file"]][each["line"]])
            for each in members
            if each["line"] < len(hashes[each["file"]])  # a file that was written anew meanwhile
        }
        return {index: notes[key] for index, key in keys.items() if key in notes}

    def _list_folders(self) -> list[Path]:
        """The folders with files of rollouts: of the steps, and of each set that was evaluated."""
        folder = self.folder / _SETS
        sets = [] if folder.is_symlink() or not folder.is_dir() else sorted(folder.iterdir())
        return [Path(FOLDER), *(_SETS / each.name for each in sets if each.is_dir() and not each.is_symlink())]

    def _list_files(self) -> Mapping[int | str, StepFiles]:
        folders = self._list_folders()
        times = [(folder, _signature(self.folder / folder)) for folder in folders]
        if self._listed[0] == times:
            return self._listed[1]
        by_step: dict[tuple[str | None, int], list[Path]] = {}
        for folder in folders:
            for (step, _), path in find_records(self.folder / folder).items():
                by_step.setdefault((folder.name if folder.parent == _SETS else None, step), []).append(path)
        files = [StepFiles(step=step, set=name, paths=tuple(paths)) for (name, step), paths in by_step.items()]
        listed = {each.name: each for each in files}
        if all(time is None or time[0] < (now_s() - _SETTLED_S) * 1e9 for _, time in times):
            self._listed = (times, listed)
        return listed

    def _find_step(self, step: int | str) -> StepFiles:
        if (found := self._list_files().get(step)) is None:
            raise LookupError(f"the run in {self.folder} has no rollouts of step {step}")
        return found

    def _find_revision(self) -> str:
        paths = [self.folder / _METRICS, self.folder / _EVALUATIONS, self.folder / _CLUSTER_EVENTS]
        paths.append(self.folder / NOTES_FILE)
        paths.append(self.folder / PROCESS_FILE)
        records = [str(_signature(path)) for files in self._list_files().values() for path in files.paths]
        return f"{[_signature(path) for path in paths]} {len(records)} {max(records, default='')}"


def _show(note: Note | None) -> dict[str, Any]:
    """The labels of a rollout, and the text; nothing if it has no note."""
    return {} if note is None else {"labels": note.labels, "note": note.text}


def _name_stores(folder: Path) -> str:
    """The stores below a folder, for a message, or that there is no folder."""
    if not folder.is_dir():
        return ": there is no such folder"
    stores = sorted(path.parent.name for path in folder.glob(f"*/{DATABASE_FILE}"))
    return f", in which there are the stores {', '.join(stores[:8])}" if stores else ""


def _signature(path: Path) -> tuple[int, int] | None:
    """Time and size: another file of the name has others."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _read_numbers(folder: Path, *parts: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The numbers and texts of a file's lines, and what is wrong with other lines; see `read_objects`."""
    lines, problems = read_objects(folder, *parts)
    shown = [{key: each for key, each in line.items() if _is_number(each) or isinstance(each, str)} for line in lines]
    return shown, problems


def _make_columns(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a run by name: `{"steps": [0, 1], "values": {"reward/mean": [0.25, None]}}`.

    A step that stands there twice counts as it was the last time.
    """
    by_step = {line["step"]: line for line in lines if _is_number(line.get("step"))}
    steps = sorted(by_step)
    names = sorted({name for line in by_step.values() for name in line if name != "step"})
    columns = {name: [_keep_number(by_step[step].get(name)) for step in steps] for name in names}
    return {"steps": steps, "values": {name: column for name, column in columns.items() if set(column) != {None}}}


def _keep_number(value: Any) -> Any:
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
