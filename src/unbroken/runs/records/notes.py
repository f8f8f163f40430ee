"""What people note of rollouts: `notes.jsonl` in a run's folder, to which `unbroken view` adds and `export` reads.

{"set": null, "step": 12, "trajectory": "0-0-80/0", "num_sampled": 58, "given": "vipa", "labels": ["wrong tool"],
 "text": "it never asks for the key", "time_s": 1790000000.0}

A line for each time that one was saved: of a rollout the last one counts, and one without labels and text takes the
note away. `set` to `given` say which rollout: a step that a continued run makes anew has the same names, other texts.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Annotated, Any

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from unbroken.errors import InvalidInputError, MetricsError
from unbroken.untrusted import open_inside, read_json

NOTES_FILE = "notes.jsonl"
MAX_NOTE_BYTES = 64 << 10
"""Of a line."""
_MAX_BYTES = 64 << 20
_MAX_PROBLEMS = 20
NoteKey = tuple[str | None, int, str, int, str | None]
"""Which rollout: set (None: training), step, trajectory, sampled ids, and the end of what was given."""
_Label = Annotated[str, StringConstraints(pattern=r"^[^\s,](?:[^\x00-\x1f\x7f,]{0,58}[^\s,])?$")]


class NoteContent(BaseModel):
    """Labels, each of 1 to 60 characters without commas, and a text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    labels: Annotated[list[_Label], Len(0, 20)]
    text: Annotated[str, Len(0, 10_000)]

    @staticmethod
    def parse(data: bytes) -> NoteContent:
        """Read what a page sends; raises `InvalidInputError` if it is not as it must be."""
        try:
            return NoteContent.model_validate(read_json(data, max_bytes=MAX_NOTE_BYTES))
        except ValidationError as error:
            raise InvalidInputError(f"a note must have labels and a text: {_describe(error)}") from None


class Note(NoteContent):
    """A line of the file."""

    set: str | None
    """The evaluated set; None for a step of training."""
    step: int
    trajectory: str
    num_sampled: int
    given: str | None
    """The end of what the policy said last."""
    time_s: float = Field(ge=0, allow_inf_nan=False)

    @staticmethod
    def of(content: NoteContent, set_name: str | None, step: int, summary: Mapping[str, Any]) -> Note:
        """A note of a rollout with this summary (`summarize`), from now."""
        _, _, trajectory, num_sampled, given = make_key(set_name, step, summary)
        return Note(
            labels=content.labels, text=content.text, set=set_name, step=step, trajectory=trajectory,
            num_sampled=num_sampled, given=given, time_s=time(),
        )  # fmt: skip

    @property
    def key(self) -> NoteKey:
        """Which rollout it is of."""
        return self.set, self.step, self.trajectory, self.num_sampled, self.given


def make_key(set_name: str | None, step: int, summary: Mapping[str, Any]) -> NoteKey:
    """The key of a rollout by its summary (`summarize`)."""
    given = summary["given"]
    return set_name, step, _clean(summary["trajectory"]), summary["num_sampled"], given and _clean(given)


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
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            note = Note.model_validate(read_json(line, max_bytes=MAX_NOTE_BYTES))
        except (InvalidInputError, ValidationError) as error:
            problems.append(f"line {number} of {NOTES_FILE} must be a note, and is left out: {_describe(error)}")
            continue
        notes.pop(note.key, None)
        if note.labels or note.text:
            notes[note.key] = note
    return notes, problems[:_MAX_PROBLEMS]


def _describe(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}, got {first.get('input')!r:.80}"


def find_refusal(folder: Path) -> str | None:
    """Why no note can be written into a run's folder, as far as can be known before; None if it can."""
    path = folder / NOTES_FILE
    if os.access(path if path.exists() else folder, os.W_OK):
        return None
    return f"{path} cannot be written: make notes in a copy of the run, or as the user who owns it"


def append_note(folder: Path, note: Note) -> None:
    """Add a line to a run's notes; nothing before it changes.

    Raises:
        InvalidInputError: the line would be too long.
        MetricsError: it cannot be written; nothing is left of it.
    """
    line = note.model_dump_json().encode("utf-8") + b"\n"
    if len(line) > MAX_NOTE_BYTES:
        raise InvalidInputError(f"a note must have at most {MAX_NOTE_BYTES} bytes, got {len(line)}")
    # The folder may come from somebody else: a link there could lead to any file of this user's, and a pipe would wait.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(folder / NOTES_FILE, flags, 0o644)
        try:
            _append(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MetricsError(f"{folder / NOTES_FILE} cannot be written: {error.strerror or error}") from error


def _append(descriptor: int, line: bytes) -> None:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        raise OSError("it is a link, or no regular file")
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # of another viewer; it is held for the write alone
    size = os.fstat(descriptor).st_size
    if size + len(line) > _MAX_BYTES:
        raise OSError(f"it must have at most {_MAX_BYTES} bytes")
    if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a line that was cut when its writer was killed
        line = b"\n" + line
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("the disk is full")
    except OSError:
        os.ftruncate(descriptor, size)
        raise
