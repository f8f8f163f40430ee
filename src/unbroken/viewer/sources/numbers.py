"""The numbers of a run over its steps, from `metrics.jsonl` and `evaluation.jsonl`, while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.untrusted import open_inside, read_json

_MAX_BYTES, _MAX_LINE_BYTES = 512 << 20, 1 << 20
_MAX_PROBLEMS = 20


def read_numbers(folder: Path, *parts: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read JSON lines of a file in a folder; returns their numbers and texts, and what is wrong with other lines.

    A last line without its end is being written, or was when the run was killed: it is left out.
    """
    name = parts[-1]
    try:
        with open_inside(folder, *parts) as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{name} cannot be read: {error.strerror}"]
    lines: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            value = read_json(line, max_bytes=_MAX_LINE_BYTES)
        except InvalidInputError:
            value = None
        if isinstance(value, dict):
            lines.append({key: each for key, each in value.items() if _is_number(each) or isinstance(each, str)})
        elif len(problems) < _MAX_PROBLEMS:
            problems.append(f"line {number} of {name} is not a JSON object, and is left out")
    return lines, problems


def make_columns(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a run by name: `{"steps": [0, 1], "values": {"reward/mean": [0.25, None]}}`.

    A step that stands there twice counts as it was the last time.
    """
    by_step = {line["step"]: line for line in lines if _is_number(line.get("step"))}
    steps = sorted(by_step)
    names = sorted({name for line in by_step.values() for name in line if name != "step"})
    columns = {name: [_number(by_step[step].get(name)) for step in steps] for name in names}
    return {
        "steps": steps,
        "values": {name: values for name, values in columns.items() if any(value is not None for value in values)},
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return value if _is_number(value) else None
