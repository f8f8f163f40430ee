"""Notes of rollouts: a file that only grows, whose last line of a rollout counts, and no link leads to another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unbroken.errors import InvalidInputError, MetricsError
from unbroken.runs.records import notes as notes_of_runs
from unbroken.runs.records.notes import (
    NOTES_FILE,
    ChangedNoteError,
    Note,
    SentNote,
    append_note,
    find_refusal,
    hash_line,
    read_notes,
)

LINE = hash_line(b"{}\n")


def sent(*, labels: list[str], text: str, sha256: str) -> SentNote:
    return SentNote(labels=labels, text=text, sha256=sha256, shown_time_s=None)


def save(folder: Path, text: str, *labels: str, set_name: str | None = None, step: int = 3) -> None:
    note = Note.of(sent(labels=list(labels), text=text, sha256=LINE), set_name, step, "g0/0")
    shown = read_notes(folder)[0].get(note.key)
    append_note(folder, note, shown_time_s=shown.time_s if shown else None)


def test_the_last_note_of_a_rollout_counts_and_an_empty_one_takes_it_away(tmp_path):
    save(tmp_path, "first", "a")
    save(tmp_path, "of an evaluation", set_name="math")
    before = (tmp_path / NOTES_FILE).read_bytes()
    save(tmp_path, "second", "b", "c")
    assert (tmp_path / NOTES_FILE).read_bytes().startswith(before)
    notes, problems = read_notes(tmp_path)
    assert problems == []
    assert [(note.text, note.labels) for note in notes.values()] == [("of an evaluation", []), ("second", ["b", "c"])]
    assert notes[None, 3, LINE].text == "second"
    assert (None, 4, LINE) not in notes
    save(tmp_path, "")
    assert [note.text for note in read_notes(tmp_path)[0].values()] == ["of an evaluation"]


def test_a_rollout_with_half_a_surrogate_pair_can_be_noted(tmp_path):
    note = Note.of(sent(labels=[], text="é", sha256=LINE), None, 0, "g0/\ud800")
    append_note(tmp_path, note, shown_time_s=None)
    assert read_notes(tmp_path)[0][None, 0, LINE].text == "é"


def test_a_note_that_another_editor_changed_meanwhile_is_not_replaced(tmp_path):
    note = Note.of(sent(labels=[], text="mine", sha256=LINE), None, 3, "g0/0")
    save(tmp_path, "first")
    first = read_notes(tmp_path)[0][note.key].time_s
    save(tmp_path, "of another editor")
    for shown in (None, first, first + 1):
        with pytest.raises(ChangedNoteError, match="load the rollout again"):
            append_note(tmp_path, note, shown_time_s=shown)
    assert [each.text for each in read_notes(tmp_path)[0].values()] == ["of another editor"]
    save(tmp_path, "")
    with pytest.raises(ChangedNoteError):
        append_note(tmp_path, note, shown_time_s=first)
    append_note(tmp_path, note, shown_time_s=None)


def test_what_is_no_note_is_named_with_its_line_and_all_others_are_read(tmp_path):
    save(tmp_path, "first")
    good = (tmp_path / NOTES_FILE).read_text()
    wrong = json.loads(good) | {"labels": ["a,b"]}
    (tmp_path / NOTES_FILE).write_text(f"{good}[1]\n{json.dumps(wrong)}\n{'[' * 2000}\n{good[:40]}")
    save(tmp_path, "last", step=9)
    notes, problems = read_notes(tmp_path)
    assert [note.text for note in notes.values()] == ["first", "last"]  # a cut line swallows no other
    assert [problem.split(" must")[0] for problem in problems] == [f"line {n} of {NOTES_FILE}" for n in (2, 3, 4, 5)]


def test_a_note_within_bounds_is_taken():
    note = SentNote.parse(json.dumps({"labels": ["a b"], "text": "x", "sha256": LINE, "shown_time_s": 1.5}).encode())
    assert (note.labels, note.text, note.shown_time_s) == (["a b"], "x", 1.5)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"labels": []}',
        b'{"labels": [], "text": "", "step": 3}',
        b'{"labels": ["a\\nb"], "text": ""}',
        b'{"labels": [" a"], "text": ""}',
        *(
            json.dumps({"labels": [label], "text": ""}).encode()
            for label in ("\x1b", "\x00a", "a\x7f", "a\x9bb", "\x85")
        ),
        b'{"labels": ["\\ud800"], "text": ""}',
        json.dumps({"labels": ["x" * 61], "text": ""}).encode(),
        json.dumps({"labels": ["x"] * 21, "text": ""}).encode(),
        json.dumps({"labels": [], "text": "x" * 10_001}).encode(),
    ],
)
def test_labels_and_texts_out_of_bounds_are_refused(body):
    place = f', "sha256": "{LINE}", "shown_time_s": null}}'.encode()
    with pytest.raises(InvalidInputError):
        SentNote.parse(body[:-1] + place if body.startswith(b"{") else body)


def test_a_file_of_bad_lines_is_given_up_and_says_so(tmp_path):
    save(tmp_path, "first")
    path = tmp_path / NOTES_FILE
    good = path.read_bytes()
    path.write_bytes(good + b"\n" * 5000 + b"\r\n{}" * 999 + b"\n" + good.replace(b'"step":3', b'"step":4'))
    notes, problems = read_notes(tmp_path)
    assert [note.step for note in notes.values()] == [3, 4]
    assert len(problems) == 20
    path.write_bytes(good + b"{}\n" * 100_000 + good.replace(b'"step":3', b'"step":4'))
    notes, problems = read_notes(tmp_path)
    assert [note.step for note in notes.values()] == [3]
    assert len(problems) == 21
    assert problems[-1] == f"{NOTES_FILE} has more than 1000 bad lines: none is read from line 1002 on"
    with pytest.raises(MetricsError, match="more than 1000 bad lines"):
        save(tmp_path, "would not be read")


def test_a_line_after_one_that_was_cut_fits_into_the_file_too(tmp_path, monkeypatch):
    path = tmp_path / NOTES_FILE
    path.write_bytes(b"{")
    note = Note.of(sent(labels=[], text="x", sha256=LINE), None, 3, "g0/0")
    size = 1 + len(note.model_dump_json()) + 1  # and the end of the cut line
    monkeypatch.setattr(notes_of_runs, "_MAX_BYTES", size)
    with pytest.raises(MetricsError, match="at most"):
        append_note(tmp_path, note, shown_time_s=None)
    assert path.read_bytes() == b"{"


def test_no_link_and_no_pipe_is_read_or_written(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept\n")
    makers = {"symlink": os.symlink, "hardlink": os.link, "pipe": lambda _, path: os.mkfifo(path)}
    for name, make in makers.items():
        folder = tmp_path / name
        folder.mkdir()
        make(target, folder / NOTES_FILE)
        with pytest.raises(MetricsError, match="cannot be written"):
            save(folder, "x")
        if name != "hardlink":
            assert read_notes(folder)[0] == {}
            assert "cannot be read" in read_notes(folder)[1][0]
    assert target.read_text() == "kept\n"


def test_a_folder_that_is_read_only_says_so(tmp_path):
    assert find_refusal(tmp_path) is None
    missing = tmp_path / "missing"
    with pytest.raises(MetricsError, match="No such file"):
        save(missing, "x")
    assert "cannot be written: make notes in a copy" in str(find_refusal(missing))
