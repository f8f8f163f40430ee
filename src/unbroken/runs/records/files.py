"""Files of records: one for each step and process, which is there whole once it is there (docs/rollouts.md).

rollouts/step-00000012.rank-0.jsonl.gz    gzip; a line for the step, then one for each trajectory
rollouts/images/SHA256                    the image files that they refer to
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, MetricsError
from unbroken.untrusted import open_inside, read_json

FOLDER = "rollouts"
FORMAT = 1
_IMAGES = "images"
_NAME = re.compile(r"step-(\d{8,12})\.rank-(\d{1,6})\.jsonl\.gz", re.ASCII)
MAX_LINE_BYTES = 64 << 20
"""Of a trajectory: 100 bytes for each of 600,000 ids."""
_MAX_LINES = 100_000
_MAX_INFLATION, _MAX_SMALL_BYTES = 200, 64 << 20
"""A file unpacks to that many times its size, or to so many bytes: rollouts to 3 to 20 times, zeros to 1,000 times."""


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


def read_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a file without parsing them. No link is followed, and what is unpacked has a limit.

    Raises:
        InvalidInputError: it is not such a file, is damaged, or is larger than rollouts can be.
    """
    try:
        with (
            open_inside(path.parent.parent, path.parent.name, path.name) as packed,
            gzip.GzipFile(fileobj=packed) as file,
        ):
            max_bytes = max(_MAX_SMALL_BYTES, _MAX_INFLATION * os.fstat(packed.fileno()).st_size)
            for number in range(_MAX_LINES + 1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES or file.tell() > max_bytes or number == _MAX_LINES:
                    raise InvalidInputError(
                        f"{path} must have at most {_MAX_LINES} lines of {MAX_LINE_BYTES} bytes, {max_bytes} bytes in "
                        f"all; line {number} has more"
                    )
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInputError(f"{path} must be a file of rollouts: {type(error).__name__}: {error}") from error


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line; raises `InvalidInputError` if it is not a JSON object."""
    value = read_json(line, max_bytes=MAX_LINE_BYTES)
    if not isinstance(value, dict):
        raise InvalidInputError("it must be a JSON object")
    return value


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a file: the step's, then those of its trajectories.

    Raises:
        InvalidInputError: it is not such a file, is damaged, or has a later format.
    """
    for number, line in enumerate(read_lines(path)):
        try:
            record = parse_line(line)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path} must be a file of rollouts: line {number}: {error}") from None
        if number == 0 and (found := record.get("format")) != FORMAT:
            raise InvalidInputError(f"{path} must have the format {FORMAT}, got {found!r}")
        yield record


def _write_whole(path: Path, data: bytes, rank: int) -> None:
    part = path.with_name(f".{path.name}.rank-{rank}.part")  # two processes may write the same image
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
