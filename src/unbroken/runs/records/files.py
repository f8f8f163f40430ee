"""Files of records: one for each step and process, which is there whole once it is there (docs/rollouts.md).

rollouts/step-00000012.rank-0.jsonl.gz    gzip; a line for the step, one of texts, then one for each trajectory
rollouts/images/SHA256                    the image files that they refer to
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unbroken.errors import InvalidInputError, MetricsError
from unbroken.untrusted import open_inside, read_json

_T = TypeVar("_T")
FOLDER = "rollouts"
FORMAT = 1
_IMAGES = "images"
_NAME = re.compile(r"step-(\d{8,12})\.rank-(\d{1,9})\.jsonl\.gz", re.ASCII)
MAX_LINE_BYTES = 64 << 20
"""Of a trajectory: 100 bytes for each of 600,000 ids."""
MAX_LINES = 1_000_000
"""Of a file: a step and its trajectories."""
MAX_TEXT, MAX_TEXTS = 8000, 4 << 20
"""Characters of a rollout's messages that a search looks at, and of all in a file: they are in one line."""
MAX_SUMMARIES = 30_000
"""In a first line; one with more rollouts has none."""
PART = "part:"
"""Before the name of a component of the reward, in a summary."""
TEXTS = "texts"
"""The kind of the line with the texts that a search looks at, after a first line with `columns`."""
_MAX_ERROR = 200
_MAX_ANSWER = 100
_MAX_PROMPT = 160
_EXPECTED = re.compile(r"answer|solution|target|label|expected|ground.?truth|gold|reward_model", re.IGNORECASE)
_NO_TEXT = frozenset({"role", "type", "sha256", "id", "tool_call_id"})
_MAX_INFLATION, _MAX_SMALL_BYTES = 200, 64 << 20
"""A file unpacks to that many times its size, or to so many bytes: rollouts to 3 to 20 times, zeros to 1,000 times.
`_pack` keeps to half of both, because the first line is packed apart."""
_GZIP = 31
"""`wbits` of zlib for a gzip file."""
_logger = logging.getLogger(__name__)


def write_records(
    folder: Path,
    step: int,
    rank: int,
    lines: Iterable[Mapping[str, Any]],
    *,
    images: Mapping[str, bytes],
    make_head: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write the file of a step, in place of one of an earlier attempt, and the images that are not there yet.

    A line is packed before the next one is made; `make_head` makes the first ones, after all others.

    Raises:
        MetricsError: it cannot be written; nothing is left of it.
    """
    path = folder / f"step-{step:08}.rank-{rank}.jsonl.gz"
    packed = _pack(lines)
    if make_head is not None:
        packed = _pack(make_head()) + packed
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for sha256, data in images.items():
            (folder / _IMAGES).mkdir(exist_ok=True)
            if not (folder / _IMAGES / sha256).exists():
                _write_whole(folder / _IMAGES / sha256, data, rank)
        _write_whole(path, packed, rank)
    except OSError as error:
        raise MetricsError(
            f"the rollouts of step {step} cannot be written to {folder}: {error}. Free space and start it again; "
            "training keeps none with --rollout-log.groups 0"
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
            for number in range(MAX_LINES + 1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES or file.tell() > max_bytes or number == MAX_LINES:
                    raise InvalidInputError(
                        f"{path} must have at most {MAX_LINES} lines of {MAX_LINE_BYTES} bytes, {max_bytes} bytes in "
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
    """Read the lines of a file: the step's, then those of its trajectories; not the texts, which they have too.

    Raises:
        InvalidInputError: it is not such a file, is damaged, or has a later format.
    """
    return (record for record in read_all(path) if record.get("kind") != TEXTS)


def read_all(path: Path) -> Iterator[dict[str, Any]]:
    """Read every line of a file, that of the texts too; raises as `read_records`."""
    number = 0
    for line in read_lines(path):
        try:
            record = parse_line(line)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path} must be a file of rollouts: line {number}: {error}") from None
        if number == 0 and (found := record.get("format")) != FORMAT:
            raise InvalidInputError(f"{path} must have the format {FORMAT}, got {found!r}")
        yield record
        number += 1
    if number == 0:
        raise InvalidInputError(f"{path} must be a file of rollouts, and has no line")


def spread(items: Sequence[_T], number: int | None) -> list[_T]:
    """Up to `number` of the items, evenly spread; all for None."""
    if number is None or number >= len(items):
        return list(items)
    return [items[k * len(items) // number] for k in range(number)]


def summarize(record: Mapping[str, Any], *, max_text: int = MAX_TEXT) -> dict[str, Any]:
    """What lists show of a trajectory's record, and what it is found by."""
    rows, text = record.get("rows") or [], join_texts(record.get("messages") or [])
    error, expected = record.get("error"), find_expected(record.get("data"))
    return {
        **{name: record.get(name) for name in ("group", "trajectory", "status", "reward", "wall_time_s")},
        "error": None if error is None else error[:_MAX_ERROR],
        **_list_parts(record.get("reward_parts") or {}),
        "prompt": _find_prompt(record), "problem": _identify_problem(record),
        "expected": None if expected is None else expected[-_MAX_ANSWER:],
        "given": _find_given(record),
        "num_rows": len(rows), "is_trained": any(row.get("is_trained") for row in rows),
        **_summarize_turns(record.get("turns") or []),
        "num_tool_errors": _count_tool_errors(record.get("counters") or {}),
        "advantage": _find_advantage(rows), "versions": _find_versions(rows), "max_abs": _find_mismatch(rows),
        "text": text[:max_text], "is_text_cut": len(text) > max_text,
    }  # fmt: skip


def _list_parts(parts: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a reward that are numbers: an environment may note others."""
    return {f"{PART}{name}": part for name, part in parts.items() if isinstance(part, (int, float))}


def _summarize_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    statuses = [status for turn in turns for status in turn.get("call_statuses") or ()]
    return {
        "num_turns": len(turns),
        "num_sampled": sum(turn.get("num_sampled") or 0 for turn in turns),
        "is_truncated": any(turn.get("finish_reason") == "length" or turn.get("cut_by") for turn in turns),
        "forks": [turn["fork"] for turn in turns if turn.get("fork")],
        "num_bad_calls": sum(status != "ok" for status in statuses),
    }


def _count_tool_errors(counters: Mapping[str, int]) -> int:
    return sum(num for name, num in counters.items() if name.startswith("tool_errors/"))


def make_first_lines(head: Mapping[str, Any], summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first line of a file, with a column for each key of its trajectories' summaries, and the line of texts."""
    columns = {key: [each.get(key) for each in summaries] for key in dict.fromkeys(itertools.chain(*summaries))}
    texts = columns.pop("text")
    parts = {key.removeprefix(PART): columns.pop(key) for key in [*columns] if key.startswith(PART)}
    return [{**head, "columns": {**columns, "parts": parts}}, {"kind": TEXTS, "texts": texts}]


def find_expected(data: Mapping[str, Any] | None) -> str | None:
    """The expected answer: the first column with such a name, otherwise the first that has one in its name."""
    columns = (data or {}).get("columns") or {}
    found = filter(_EXPECTED.search, columns)
    name = min(found, key=lambda name: not _EXPECTED.fullmatch(name), default=None)
    value = None if name is None else columns[name]
    if isinstance(value, Mapping):  # verl's reward_model
        value = value.get("ground_truth", value)
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def find_conversation(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a rollout, to its newest reply; of a session with several agents those of the first."""
    messages = record.get("messages") or []
    branches = [own for row in record.get("rows") or () if (own := row.get("messages"))]
    newest = max((own for own in branches if own[0] == 0), key=max, default=range(len(messages)))
    return [messages[number] for number in newest]


def _identify_problem(record: Mapping[str, Any]) -> str:
    """What is the same for all rollouts of a problem, at any step and of any run: 16 hexadecimal digits.

    It is made of the row of the data set; without one, of the messages before the first answer.
    """
    columns = (record.get("data") or {}).get("columns")
    text = json.dumps(columns or _list_given(record), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]  # as `_encode` writes it


def _find_prompt(record: Mapping[str, Any]) -> str | None:
    """The beginning of the last message that is not the policy's before its first answer: the question."""
    given = _list_given(record)
    return join_texts(given[-1:]).strip()[:_MAX_PROMPT] if given else None


def _list_given(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages before the first answer that was sampled: a prompt may have answers as examples."""
    messages, turns = find_conversation(record), record.get("turns") or []
    first = turns[0].get("message") if turns else None
    places = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
    sampled = next((n for n in places if messages[n] == first), places[0] if places else len(messages))
    return messages[:sampled]


def _find_given(record: Mapping[str, Any]) -> str | None:
    """The end of what the policy said last."""
    messages = reversed(find_conversation(record))
    last = next((message for message in messages if message.get("role") == "assistant"), None)
    return None if last is None else join_texts([last]).strip()[-_MAX_ANSWER:]


def _find_advantage(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean advantage of the ids in the loss."""
    spans = [span for row in rows for span in row.get("advantages") or ()]
    num_ids = sum(stop - start for start, stop, _ in spans)
    return sum((stop - start) * value for start, stop, value in spans) / num_ids if num_ids else None


def _find_versions(rows: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The first and the last policy version that sampled."""
    versions = [version for row in rows for _, _, version in row.get("policy_versions") or ()]
    return [min(versions), max(versions)] if versions else None


def _find_mismatch(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest difference of the trainer's and the sampler's logprobs, of all sampled ids."""
    pairs = (zip(row.get("trainer_logprobs") or (), row.get("rollout_logprobs") or (), strict=False) for row in rows)
    return max((abs(trainer - sampler) for each in pairs for trainer, sampler in each), default=None)


def join_texts(messages: Sequence[Mapping[str, Any]]) -> str:
    """All text of messages, to be searched."""
    return "\n".join(text for message in messages for text in _find_texts(message))


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _NO_TEXT:
                yield from _find_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_texts(item)


def _pack(lines: Iterable[Mapping[str, Any]]) -> bytearray:
    """Pack lines. Where one id a million times packs better than readers take, some lines are stored as they are."""
    packed, size, packer = bytearray(), 0, zlib.compressobj(5, wbits=_GZIP)
    for line in lines:
        text = _encode(line)
        if len(text) > MAX_LINE_BYTES and line.get("data") is not None:
            _logger.warning("rollout %s is kept without its row of the data set, which is too long", line["trajectory"])
            text = _encode({**line, "data": None})
        size += len(text)
        if size > _MAX_SMALL_BYTES // 2 and size > _MAX_INFLATION // 2 * len(packed):
            packed += packer.flush() + zlib.compress(text, 0, wbits=_GZIP)
            packer = zlib.compressobj(5, wbits=_GZIP)
        else:
            packed += packer.compress(text)
    return packed + packer.flush()


def _encode(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")


def _write_whole(path: Path, data: bytes | bytearray, rank: int) -> None:
    part = path.with_name(f".{path.name}.rank-{rank}.part")  # two processes may write the same image
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
