"""Files of records: one for each step and process, which is there whole once it is there (docs/rollouts.md).

rollouts/step-00000012.rank-0.jsonl.gz    gzip; a line for the step, then one for each trajectory
rollouts/images/SHA256                    the image files that they refer to
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from unbroken.errors import InvalidInputError, MetricsError

FOLDER = "rollouts"
FORMAT = 1
_IMAGES = "images"
_NAME = re.compile(r"step-(\d{8,})\.rank-(\d+)\.jsonl\.gz")


def write_records(
    folder: Path, step: int, rank: int, lines: Iterable[Mapping[str, Any]], *, images: Mapping[str, bytes]
) -> Path:
    """Write the file of a step, in place of one of an earlier attempt, and the images that are not there yet.

    Raises:
        MetricsError: it cannot be written; nothing is left of it.
    """
    path = folder / f"step-{step:08}.rank-{rank}.jsonl.gz"
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for sha256, data in images.items():
            (folder / _IMAGES).mkdir(exist_ok=True)
            if not (folder / _IMAGES / sha256).exists():
                _write_whole(folder / _IMAGES / sha256, data, rank)
        _write_whole(path, gzip.compress(text.encode("utf-8", "replace"), compresslevel=5, mtime=0), rank)
    except OSError as error:
        raise MetricsError(
            f"the rollouts of step {step} cannot be written to {folder}: {error}. Free space and start the run again, "
            "or keep none: --rollout-log.groups 0"
        ) from error
    return path


def find_records(folder: Path) -> dict[tuple[int, int], Path]:
    """The files in a folder by step and rank, in this order; also while a run writes there."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((_NAME.fullmatch(path.name), path) for path in paths)
    return dict(sorted(((int(match[1]), int(match[2])), path) for match, path in found if match is not None))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a file: the step's, then those of its trajectories.

    Raises:
        InvalidInputError: it is not such a file, is damaged, or has a later format.
    """
    with _open_records(path) as file:
        for number, line in enumerate(file):
            record = json.loads(line)
            if number == 0:
                _check_format(path, record)
            yield record


def read_record(path: Path, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read two lines of a file: the step's, and line `number`; those between are not parsed.

    Raises:
        InvalidInputError: as for `read_records`, or there is no such line.
    """
    with _open_records(path) as file:
        head = json.loads(next(file, ""))
        _check_format(path, head)
        line = next(itertools.islice(file, number - 1, None), None) if number > 0 else None
        if line is None:
            raise InvalidInputError(f"{path} has no line {number} of a trajectory")
        return head, json.loads(line)


@contextmanager
def _open_records(path: Path) -> Iterator[TextIO]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield file
    except (OSError, EOFError, zlib.error, ValueError, AttributeError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path} must be a file of rollouts: {type(error).__name__}: {error}") from error


def _check_format(path: Path, head: Mapping[str, Any]) -> None:
    if (found := head.get("format")) != FORMAT:
        raise InvalidInputError(f"{path} must have the format {FORMAT}, got {found!r}")


def _write_whole(path: Path, data: bytes, rank: int) -> None:
    part = path.with_name(f".{path.name}.rank-{rank}.part")  # two processes may write the same image
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
