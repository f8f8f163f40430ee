"""Hostile files and bodies, and the readers that are given them, in a process that can be stopped."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import sqlite3
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.errors import UnbrokenError

_prepared: dict[tuple[str, str], tuple[Path, list[tuple[str, bytes | Callable[[Path], object], bool]]]] = {}
"""The file of each reader that was attacked, and the attacks: in the process that is attacked."""

LONG = "n" * 200
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE_NUMBER = b"1" + b"0" * 400
WRONG: Mapping[str, Any] = {
    "null": None, "true": True, "negative": -1, "fraction": 1.5, "text": "x", "list": [], "object": {}, "lists": [[]],
    "nulls": [None], "large": 2**70, "huge": 10**400, "long": LONG, "NUL": "a\0b", "surrogate": "\ud800",
    "path": "../../x",
}  # fmt: skip
"""What may stand in the place of a field."""
SPARSE_BYTES = 3 << 30


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Something that reads a file that others wrote."""

    make: Callable[[Path], Path]
    """Write what is right into a folder; returns the file that is attacked."""
    read: Callable[[Path], Any]
    """Read that file, or the folder of it."""
    kind: str
    """Of the file: json, lines, gzip, text, toml, weights, image, sqlite."""
    says: str = ""
    """What an error names; by default the file."""
    may_be_missing: bool = False
    """A file that is not there is nothing yet."""
    is_lenient: bool = False
    """By its contract a file that is wrong is as one that is missing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a reader ended."""

    error: str = ""
    """Class and message of our own exception; "" without one."""
    crash: str = ""
    """The traceback of any other."""
    effort: float = 0.0
    """How many `measure_yard` it took: CPU time, as other tests run beside it, in units that are as slow as the machine
    and a tracer of lines make Python."""
    num_left_open: int = 0
    """Files that are open, and were not before."""
    num_bytes: int = 0
    """By which the most memory in use rose."""


def list_attacks(reader: Reader, good: bytes) -> Iterator[tuple[str, bytes | Callable[[Path], object], bool]]:
    """The attacks on a reader: names, what to put in the place of its file, and whether it must be refused."""
    yield "pipe", os.mkfifo, True
    yield "device", lambda path: path.symlink_to("/dev/zero"), True
    yield "folder", Path.mkdir, True
    yield "nothing", lambda path: None, not reader.may_be_missing
    yield "link to itself", lambda path: path.symlink_to(path), True
    yield "3 GiB", _write_sparse, True
    yield "empty", b"", reader.kind not in ("toml", "text") and not reader.may_be_missing
    yield "half", good[: len(good) // 2], reader.kind not in ("text", "bytes", "toml")
    yield "any bytes", bytes(range(256)) * 100, reader.kind != "bytes"
    match reader.kind:
        case "json":
            yield from _attack_json(good)
        case "lines":
            yield from ((name, data + b"\n", is_refused) for name, data, is_refused in _attack_json(good))
            yield "two million lines", b"[]\n" * 2_000_000, True
        case "gzip":
            for name, data, is_refused in _attack_json(gzip.decompress(good).splitlines()[0]):
                yield name, gzip.compress(data), is_refused
            yield "a bomb", gzip.compress(bytes(64 << 20)) * 64, True
        case "toml":
            yield "deep", b"a = " + DEEP, True
            yield "deep keys", b"a = " + b"{a=" * 50_000 + b"1" + b"}" * 50_000, True
        case "weights":
            yield from _attack_weights()
        case "sqlite":
            yield from _attack_sqlite(good)
        case "image":
            yield "a bomb", good[:16] + struct.pack(">II", 60_000, 60_000) + good[24:], True


def _write_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


def _attack_json(good: bytes) -> Iterator[tuple[str, bytes, bool]]:
    record = json.loads(good)
    yield "deep", DEEP, True
    yield "deep objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, True
    yield "two million lists", b"[" + b"[]," * 2_000_000 + b"[]]", True
    yield "NaN", b'{"x": NaN}', True
    for name, value in WRONG.items():
        yield name, json.dumps(value).encode(), True
    if not isinstance(record, dict):
        return
    first = json.dumps(next(iter(record))).encode()
    for name, value in (("deep", DEEP), ("5000 digits", b"1" * 5000)):
        yield f"{name} in a field", b"{" + first + b":" + value + b"," + good.lstrip()[1:], True
    yield "the same key twice", good.rstrip()[:-1] + b"," + first + b":" + json.dumps(record).encode() + b"}", False
    for key in record:
        yield f"without {key}", json.dumps({name: each for name, each in record.items() if name != key}).encode(), False
        for name, value in WRONG.items():
            yield f"{key} is {name}", json.dumps({**record, key: value}).encode(), False


def _attack_weights() -> Iterator[tuple[str, bytes, bool]]:
    def with_header(header: bytes, size: int | None = None) -> bytes:
        return struct.pack("<Q", len(header) if size is None else size) + header

    yield "a header of 2**64 bytes", with_header(b"{}", 2**64 - 1), True
    yield "a deep header", with_header(b'{"a":' * 50_000), True
    yield "offsets beyond the file", with_header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'), True
    shape = str(2**62).encode()
    yield (
        "a shape of 2**62",
        with_header(b'{"a":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,' + shape + b"]}}"),
        True,
    )


def _attack_sqlite(good: bytes) -> Iterator[tuple[str, Callable[[Path], object], bool]]:
    def change(*statements: str) -> Callable[[Path], object]:
        def write(path: Path) -> None:
            path.write_bytes(good)
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                for statement in ("PRAGMA foreign_keys = OFF", *statements):
                    connection.execute(statement)

        return write

    yield "a later version", change("PRAGMA user_version = 1000"), True
    yield "a version below 0", change("PRAGMA user_version = -1"), True
    yield "of another program", change(*_find_drops(good), "CREATE TABLE a (b)"), True


def _find_drops(database: bytes) -> list[str]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(database[:18] + b"\1\1" + database[20:])  # one in memory cannot have a log
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        return [f"DROP TABLE {name}" for (name,) in connection.execute(tables)]


def attack(readers: str, name: str, folder: str, number: int) -> tuple[str, bool, Outcome] | None:
    """Attack a reader of the module `readers`; returns the attack's name, whether it must be refused, and what came.

    None if it has no attack of this number. Number 0 is the file as it should be.
    """
    from importlib import import_module

    reader: Reader = import_module(readers).READERS[name]
    if (name, folder) not in _prepared:
        shutil.rmtree(folder, ignore_errors=True)  # a process before may have been stopped
        Path(folder).mkdir()
        path = reader.make(Path(folder))
        good = path.read_bytes()
        _prepared[name, folder] = path, [("none", good, False), *list_attacks(reader, good)]
    path, attacks = _prepared[name, folder]
    if number == len(attacks):
        del _prepared[name, folder]
        return None
    title, content, is_refused = attacks[number]
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    return title, is_refused, watch(lambda: reader.read(path))


def watch(work: Callable[[], Any]) -> Outcome:
    """Call it, and say how it ended and what it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the most memory in use is counted anew
    num_open = _count_open()
    before, began_s = _peak(), time.process_time()
    error = crash = ""
    try:
        work()
    except UnbrokenError as caught:
        error = f"{type(caught).__name__}: {caught}"
    except BaseException:
        crash = traceback.format_exc()[-1500:]
    return Outcome(
        error=error,
        crash=crash,
        effort=(time.process_time() - began_s) / measure_yard(),
        num_bytes=_peak() - before,
        num_left_open=_count_open() - num_open,
    )


@lru_cache(maxsize=1)
def measure_yard() -> float:
    """The CPU seconds of 100,000 calls of a function in Python, in this process: 0.005 where that was tried, and
    0.06 under coverage.
    """
    began_s, num_tries = time.process_time(), 0
    # Some kernels count a process's time in steps of 0.08 s: one try alone could take none.
    while (taken_s := time.process_time() - began_s) < 0.4:
        for number in range(100_000):
            _step(number)
        num_tries += 1
    return taken_s / num_tries


def _step(number: int) -> int:
    return number


def _count_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next((line for line in lines if line.startswith("VmHWM")), None)
    if found is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return int(found.split()[1]) << 10


def make_npy(shape: tuple[int, ...]) -> bytes:
    """An .npy file whose header promises this shape, without the numbers."""
    header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return np.lib.format.magic(1, 0) + struct.pack("<H", len(header)) + header


BODIES: Mapping[str, bytes] = {
    "nothing": b"", "half": b'{"model": "m", "messages": [', "any bytes": bytes(range(256)) * 10, "deep": DEEP,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "two million lists": b"[" + b"[]," * 2_000_000 + b"[]]",
    "NaN": b'{"x": NaN}', "infinity": b'{"x": 1e999}', "5000 digits": b'{"x": ' + b"1" * 5000 + b"}",
    "the same key twice": b'{"a": 1, "a": 2}', "compact with an array of 2**62": b"UNBRKN\0\1\x40\0\0\0"
    + b'{"prompts": [{"$array": ["<i4", [4611686018427387904], 0]}]}'.ljust(64),
    **{name: json.dumps(value).encode() for name, value in WRONG.items()},
}  # fmt: skip
"""Bodies of requests that no route takes, or not with an error of the server."""
