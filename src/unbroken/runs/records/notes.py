"""What people note of rollouts: `notes.jsonl` in a run's folder, to which `unbroken view` adds and `export` reads.

{"set": null, "step": 12, "trajectory": "0-0-80/0", "sha256": "5fd9...", "labels": ["wrong tool"],
 "text": "it never asks for the key", "time_s": 1790000000.0}

A line for each time that one was saved: of a rollout the last one counts, and one without labels and text takes the
note away. `sha256` is of the rollout's line: a step that a continued run makes anew has the same names, other lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from time import time
from typing import Annotated

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from unbroken.errors import InvalidInputError, MetricsError
from unbroken.reports import make_printable
from unbroken.runs.records.files import read_lines
from unbroken.untrusted import open_inside, read_json

NOTES_FILE = "notes.jsonl"
MAX_NOTE_BYTES = 64 << 10
"""Of a line."""
_MAX_BYTES = 16 << 20
"""Of the file: some 100,000 short notes, which are read in a second or two."""
_MAX_PROBLEMS = 20
_MAX_BAD_LINES = 1000
"""After so many lines that are no notes no more are read: each of them takes far longer than a note."""
NoteKey = tuple[str | None, int, str]
"""Which rollout: set (None: training), step, and the SHA-256 of its line."""
_CONTROL = r"\x00-\x1f\x7f-\x9f"
_EDGE = rf"[^\s,{_CONTROL}]"
_Label = Annotated[str, StringConstraints(pattern=rf"^{_EDGE}(?:[^,{_CONTROL}]{{0,58}}{_EDGE})?$")]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ChangedNoteError(InvalidInputError):
    """A note is not saved, because the rollout or the note is another than the one that was shown."""


class _NoteContent(BaseModel):
    """Labels, each of 1 to 60 characters without commas, and a text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    labels: Annotated[list[_Label], Len(0, 20)]
    text: Annotated[str, Len(0, 10_000)]
    sha256: _Sha256
    """Of the rollout's line, see `hash_line`."""


class SentNote(_NoteContent):
    """What a page sends."""

    shown_time_s: float | None
    """The `time_s` of the note that the page showed; None if the rollout had none."""

    @staticmethod
    def parse(data: bytes) -> SentNote:
        """Read what a page sends; raises `InvalidInputError` if it is not as it must be."""
        try:
            return SentNote.model_validate(read_json(data, max_bytes=MAX_NOTE_BYTES))
        except ValidationError as error:
            raise InvalidInputError(f"a note must have labels and a text: {_describe(error)}") from None


class Note(_NoteContent):
    """A line of the file."""

    set: str | None
    """The evaluated set; None for a step of training."""
    step: int
    trajectory: str
    time_s: float = Field(ge=0, allow_inf_nan=False)

    @staticmethod
    def of(content: _NoteContent, set_name: str | None, step: int, trajectory: str) -> Note:
        """A note of a rollout, from now."""
        return Note(
            labels=content.labels,
            text=content.text,
            sha256=content.sha256,
            set=set_name,
            step=step,
            trajectory=_clean(trajectory),
            time_s=time(),
        )

    @property
    def key(self) -> NoteKey:
        """Which rollout it is of."""
        return self.set, self.step, self.sha256


def hash_line(line: bytes) -> str:
    """What a note names a rollout by: the SHA-256 of its line in the file of rollouts, with its end."""
    return hashlib.sha256(line).hexdigest()


def hash_lines(path: Path) -> list[str]:
    """`hash_line` of each line of a file of rollouts, the first one too; of a damaged one, of those before it."""
    hashes: list[str] = []
    with suppress(InvalidInputError):
        hashes.extend(map(hash_line, read_lines(path)))
    return hashes


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which a record may have and a note may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_notes(folder: Path) -> tuple[dict[NoteKey, Note], list[str]]:
    """The notes of a run by their rollouts, and what is wrong with other lines. No link is followed."""
    try:
        with open_inside(folder, NOTES_FILE) as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [f"{NOTES_FILE} cannot be read: {error.strerror or error}"]
    if len(data) > _MAX_BYTES:
        return {}, [f"{NOTES_FILE} must have at most {_MAX_BYTES} bytes, and is not read"]
    return _parse_lines(data)


def _parse_lines(data: bytes) -> tuple[dict[NoteKey, Note], list[str]]:
    notes: dict[NoteKey, Note] = {}
    problems: list[str] = []
    num_bad = 0
    for number, line in enumerate(BytesIO(data), start=1):
        if not line.strip():
            continue
        try:
            note = Note.model_validate(read_json(line, max_bytes=MAX_NOTE_BYTES))
        except (InvalidInputError, ValidationError) as error:
            num_bad += 1
            if num_bad > _MAX_BAD_LINES:
                most = f"{NOTES_FILE} has more than {_MAX_BAD_LINES} bad lines"
                problems.append(f"{most}: none is read from line {number} on")
                break
            if num_bad <= _MAX_PROBLEMS:
                problems.append(f"line {number} of {NOTES_FILE} must be a note, and is left out: {_describe(error)}")
            continue
        notes.pop(note.key, None)
        if note.labels or note.text:
            notes[note.key] = note
    return notes, problems


def _describe(error: Exception) -> str:
    """What is wrong, for a terminal too: without control characters, which a field's name may have."""
    if not isinstance(error, ValidationError):
        return make_printable(str(error))
    first = error.errors(include_url=False, include_context=False)[0]
    place = make_printable(".".join(map(str, first["loc"])))[:80] or "it"
    return f"{place}: {first['msg']}, got {first.get('input')!r:.80}"


def find_refusal(folder: Path) -> str | None:
    """Why no note can be written into a run's folder, as far as can be known before; None if it can."""
    path = folder / NOTES_FILE
    if os.access(path if path.exists() else folder, os.W_OK):
        return None
    return f"{path} cannot be written: make notes in a copy of the run, or as the user who owns it"


def append_note(folder: Path, note: Note, *, shown_time_s: float | None) -> None:
    """Add a line to a run's notes; nothing before it changes. `shown_time_s` is as in `SentNote`.

    Raises:
        ChangedNoteError: another viewer saved or removed a note of the rollout since it was shown.
        InvalidInputError: the line would be too long.
        MetricsError: it cannot be written; nothing is left of it.
    """
    line = note.model_dump_json().encode("utf-8") + b"\n"
    if len(line) > MAX_NOTE_BYTES:
        raise InvalidInputError(f"a note must have at most {MAX_NOTE_BYTES} bytes, got {len(line)}")
    # The folder may come from another user: a link there could lead to any file of this user's, and a pipe would wait.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(folder / NOTES_FILE, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # of another viewer; until it is closed
            _check_unchanged(folder, note, shown_time_s)
            _append(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MetricsError(f"{folder / NOTES_FILE} cannot be written: {error.strerror or error}") from error


def _check_unchanged(folder: Path, note: Note, shown_time_s: float | None) -> None:
    notes, problems = read_notes(folder)
    if len(problems) > _MAX_PROBLEMS:  # what is added would not be read
        raise MetricsError(f"{folder / NOTES_FILE} cannot be written: {problems[-1]}")
    last = notes.get(note.key)
    if (last.time_s if last else None) != shown_time_s:
        raise ChangedNoteError("the note was changed meanwhile: load the rollout again")


def _append(descriptor: int, line: bytes) -> None:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        raise OSError("it is a link, or no regular file")
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a line that was cut when its writer was killed
        line = b"\n" + line
    if size + len(line) > _MAX_BYTES:
        raise OSError(f"it must have at most {_MAX_BYTES} bytes")
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("the disk is full")
    except OSError:
        os.ftruncate(descriptor, size)
        raise
