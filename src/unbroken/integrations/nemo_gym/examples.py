"""Examples of NeMo Gym: a JSONL file, each line with the parameters of OpenAI's Responses and what the verifier needs.

    {"responses_create_params": {"input": [{"role": "user", "content": "Add 4."}], "tools": [...]}, "expected_count": 7}

The lines are not read by `datasets`, which gives all rows the same keys, in the schemas of tools too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError

PARAMS = "responses_create_params"
_NUM_FILES = 4
"""Files whose lines are kept: that of training, and those of evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A line of the file."""

    row: Mapping[str, Any]
    """All of it, as the server gets it."""
    place: str
    """The file and the number of the line, for errors."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of Responses: `input`, `tools`, ..."""
        params: Mapping[str, Any] = self.row[PARAMS]
        return params


class Examples:
    """The examples of a file."""

    def __init__(self, file: Path) -> None:
        """Read the file, unless it was read before and did not change since.

        Raises:
            InvalidInputError: there is no such file, it has no lines, or a line is not an example.
        """
        if not file.is_file():
            raise InvalidInputError(f"the examples {file} cannot be read: there is no such file")
        self._file = file
        self._lines = _read_lines(file, file.stat().st_mtime_ns)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Example:
        number, line = self._lines[index]
        return _parse(line, f"{self._file}, line {number}")


@functools.lru_cache(maxsize=_NUM_FILES)
def _read_lines(file: Path, _changed_ns: int) -> tuple[tuple[int, str], ...]:
    """The lines that are not empty, each with its number; all are checked."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except ValueError as error:
        raise InvalidInputError(f"the examples {file} must be text in UTF-8: {error}") from None
    found = tuple((number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise InvalidInputError(f"the examples {file} must have at least one line, got none")
    for number, line in found:
        _parse(line, f"{file}, line {number}")
    return found


def _parse(line: str, place: str) -> Example:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{place} must be JSON: {error}") from None
    params = row.get(PARAMS) if isinstance(row, dict) else None
    if not isinstance(params, dict) or not params.get("input"):
        raise InvalidInputError(
            f"{place} must have {PARAMS}.input, the first messages, got {line[:200]!r}: where a template has the "
            "prompts, let NeMo Gym prepare the examples first"
        )
    return Example(row=row, place=place)
