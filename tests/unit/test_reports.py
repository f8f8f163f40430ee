"""Reports of commands as text, Markdown and JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from unbroken.errors import InvalidInputError
from unbroken.reports import Report, ReportTable, link_pages, write_file

ROOT = Path(__file__).parents[2]
NUMBERS = ReportTable(
    title="two models",
    columns=("", "A of a long name", "B"),
    rows=[("reward", "0.5 [0.4, 0.6]", "1"), ("seconds", "12", "")],
)


def test_a_report_is_its_title_its_conclusions_and_its_tables():
    words = ReportTable(rows=[("template", "append-only", "keeps the history"), ("drift", "none")])
    report = Report(title="unbroken try", conclusions=["All is well."], tables=[NUMBERS, words], values={"reward": 0.5})
    assert report.to_text() == (
        "unbroken try\n\nAll is well.\n\n"
        "two models\n"
        "            A of a long\n"
        "                   name  B\n"
        "reward   0.5 [0.4, 0.6]  1\n"
        "seconds              12\n\n"
        "template        append-only\n"
        "                keeps the history\n"
        "drift           none\n"
    )
    assert json.loads(report.to_json()) == {"reward": 0.5}


def test_columns_that_do_not_fit_stand_in_blocks_each_with_the_names_of_the_rows():
    text = "\n".join(NUMBERS.to_lines(25))
    assert text.count("reward ") == 2
    assert max(map(len, text.splitlines())) <= 25
    assert text.replace("\n", " ").split()[-4:] == ["B", "reward", "1", "seconds"]


def test_text_from_outside_stays_on_its_line_and_moves_no_cursor():
    bad = "a\x1b[2J\nb"
    table = ReportTable(columns=("", bad), rows=[(bad, bad)])
    report = Report(title=bad, conclusions=[bad], tables=[table, ReportTable(rows=[(bad, bad)])], values=None)
    assert all(line.isprintable() for line in report.to_text().splitlines())
    assert report.to_text().count("a\\x1b[2J\\nb") == 7


def test_a_bar_in_a_cell_ends_no_cell_of_markdown():
    table = ReportTable(columns=("name", "value"), rows=[("a|b", "c\nd"), ("e", "")])
    assert table.to_markdown() == "| name | value |\n|---|---|\n| a\\|b | c<br>d |\n| e | |\n"


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path):
    write_file(tmp_path / "new" / "report.txt", "first")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.txt"]
    write_file(tmp_path / "new" / "report.txt", "second")
    assert (tmp_path / "new" / "report.txt").read_text() == "second"
    (tmp_path / "new" / ".other.txt.part").mkdir()
    with pytest.raises(InvalidInputError, match=r"other\.txt cannot be written: Is a directory"):
        write_file(tmp_path / "new" / "other.txt", "third")
    write_file(Path("/dev/null"), "to a device")


@pytest.mark.parametrize(
    ("owner", "shown"),
    [
        (
            "somebody",
            "see https://somebody.github.io/unbroken/engines/#one-policy (https://somebody.github.io/unbroken/runs/)",
        ),
        ("OWNER", "see docs/engines.md#one-policy (docs/runs.md)"),
    ],
)
def test_a_page_has_its_address_in_a_release_and_its_path_in_a_clone(owner, shown, tmp_path, monkeypatch):
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    lines = [f"Project-URL: {name}, {url}" for name, url in urls.items()]
    about = tmp_path / "unbroken-9.dist-info"
    about.mkdir()
    text = "\n".join(["Metadata-Version: 2.1", "Name: unbroken", "Version: 9", *lines])
    (about / "METADATA").write_text(text.replace("OWNER", owner))
    monkeypatch.syspath_prepend(tmp_path)
    assert link_pages("see docs/engines.md#one-policy (docs/runs.md)") == shown
    others = "/home/me/docs/notes.md ../docs/notes.md ./docs/notes.md my-docs/notes.md"
    assert link_pages(others) == others, "files of the user's"
