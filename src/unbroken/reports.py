"""Reports of commands: a title, conclusions and tables, as text for a terminal and as JSON.

`unbroken audit`, `demo`, `eval` and `numerics` end with one. A command that has a page too draws it with
`viewer.reports`, from the same values.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError

WIDTH = 80
"""Columns of a report's text."""
_LABEL_WIDTH = 16
_MIN_WIDTH = 12
"""Of a column of numbers, so that its name is not wrapped after each word."""
_GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Rows of texts, each of which may be from outside. The first text of a row is its name."""

    title: str = ""
    columns: Sequence[str] = ()
    """A name for each text of a row. Without them a row is its name and lines of words, which are wrapped."""
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        """Check the rows against the columns."""
        assert len(self.columns) != 1, "a table with one column has only names of rows"
        for number, row in enumerate(self.rows):
            assert not self.columns or len(row) == len(self.columns), (
                f"row {number} must have a text for each of {len(self.columns)} columns, got {len(row)}"
            )

    def to_lines(self, width: int) -> Iterator[str]:
        """The table as lines of text; columns that do not fit beside each other stand in blocks below each other."""
        if self.title:
            yield shorten(make_printable(self.title), width)
        if self.columns:
            yield from self._lay_out_columns(width)
            return
        for name, *lines in self.rows:
            yield from _wrap_row(make_printable(name), lines, width)

    def to_markdown(self) -> str:
        """The table in Markdown."""
        lines = ["".join(f"| {_escape(text)} " if text else "| " for text in row) for row in (self.columns, *self.rows)]
        lines.insert(1, "|---" * len(self.columns))
        return "".join(f"{line}|\n" for line in lines)

    def _lay_out_columns(self, width: int) -> Iterator[str]:
        names, *columns = (_Column.of(name, [row[k] for row in self.rows]) for k, name in enumerate(self.columns))
        while columns:
            block = [columns.pop(0)]
            while columns and sum(each.width + len(_GAP) for each in [names, *block, columns[0]]) <= width + len(_GAP):
                block.append(columns.pop(0))
            yield from _lay_out([names, *block])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column as it is shown: lines of its name, and a text for each row."""

    name: list[str]
    texts: list[str]
    width: int

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> _Column:
        """Wrap the name in the width of the texts."""
        shown = [make_printable(text) for text in texts]
        lines = textwrap.wrap(make_printable(name), max([_MIN_WIDTH, *map(len, shown)]))
        return cls(name=lines, texts=shown, width=max(map(len, [*lines, *shown]), default=0))


def _lay_out(columns: Sequence[_Column]) -> Iterator[str]:
    """The lines of columns beside each other: the first is aligned on the left, numbers are on the right."""
    height = max(len(each.name) for each in columns)
    cells = [[""] * (height - len(each.name)) + each.name + each.texts for each in columns]
    for name, *values in zip(*cells, strict=True):
        aligned = [f"{value:>{column.width}}" for value, column in zip(values, columns[1:], strict=True)]
        yield _GAP.join([f"{name:<{columns[0].width}}", *aligned]).rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a command has found."""

    title: str
    conclusions: Sequence[str]
    """Sentences; they may hold text from outside."""
    tables: Sequence[ReportTable]
    values: Any
    """All numbers, of types that JSON has."""

    def to_text(self, width: int = WIDTH) -> str:
        """The report for a terminal with this number of columns; texts from outside cannot move its cursor."""
        lines = [shorten(make_printable(self.title), width), ""]
        for sentence in self.conclusions:
            lines += textwrap.wrap(make_printable(sentence), min(width, WIDTH), break_on_hyphens=False)
        for table in self.tables:
            lines += ["", *table.to_lines(width)]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The values; raises as `format_json`."""
        return format_json(self.values)


def format_json(values: Any) -> str:
    """What a command has found as JSON; raises `ValueError` for a number that is not finite."""
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def make_printable(text: str) -> str:
    """Put text from outside on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, length: int, *, num_last: int = 0) -> str:
    """Cut a text that is longer, but for its last `num_last` characters."""
    if len(text) <= length:
        return text
    return f"{text[: length - 2 - num_last]}..{text[len(text) - num_last :]}"


_PAGE = re.compile(r"(?<![\w/.-])docs/([\w/-]+)\.md(#[\w-]+)?")
"""A page of the documentation, as texts of ours name it: its path in a clone. A longer path is a file of the user's."""


def link_pages(text: str) -> str:
    """The text with the address of each page that it names, in a release; who has that may have no folder `docs`.

        docs/engines.md#one-policy  ──►  https://example.github.io/unbroken/engines/#one-policy

    A clone's address is that of OWNER until a release is made of it (`tools/prepare_release.py`): its pages keep their
    paths.
    """

    def link(found: re.Match[str]) -> str:
        try:
            urls = metadata("unbroken").get_all("Project-URL") or ()
        except PackageNotFoundError:  # on the path of Python, and not installed
            return found[0]
        site = next((url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")), "OWNER")
        return found[0] if "OWNER" in site else f"{site}{found[1]}/{found[2] or ''}"

    return _PAGE.sub(link, text)


def format_percent(part: float, whole: float = 1) -> str:
    """Show a share in percent with one decimal."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def to_plain(value: Any) -> Any:
    """Convert dataclasses, enums and mappings to values that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    return value


def write_file(file: Path, text: str) -> None:
    """Write a report, whole or not at all, and create its folder; raises `InvalidInputError` if it cannot be written.

    A file that is there already, as of a command that continues, is kept until the new one is whole.
    """
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():  # /dev/stdout: there is nothing to keep, and no place beside it
            file.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror or error}") from None


def _wrap_row(name: str, lines: Sequence[str], width: int) -> Iterator[str]:
    """Put a name before the first of the lines."""
    for line in lines:
        wrapped = textwrap.wrap(
            make_printable(line), width - _LABEL_WIDTH, subsequent_indent=_GAP, break_on_hyphens=False
        )
        for each in wrapped or [""]:
            yield f"{name:<{_LABEL_WIDTH}}{each}".rstrip()
            name = ""


def _escape(text: str) -> str:
    """A cell of a table in Markdown, on one line and without a bar that would end it."""
    return text.replace("|", "\\|").replace("\n", "<br>")
