"""Rollouts of a run or of a gateway's store as rows for other tools, one for each branch that can be trained.

The prompt 1 2, the sampled 3 4, the bridge 5 and the sampled 6 become, in the form

    rows    token_ids 1 2 3 4 5 6    sampled_mask 0 0 1 1 0 1    rollout_logprobs - - -.1 -.2 - -.3 (- is null)
    trl     prompt_ids 1 2   completion_ids 3 4 5 6   env_mask 1 1 0 1        logprobs -.1 -.2 nan -.3
    verl    prompt_ids 1 2   response_ids 3 4 5 6     response_mask 1 1 0 1   response_logprobs -.1 -.2 0 -.3

One rollout after the other is read and written: the size of a run takes no memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from unbroken.errors import ExportError, InvalidInputError, UnbrokenError, missing_extra
from unbroken.ledger.records import StoredSession
from unbroken.ledger.store import is_postgres_url, open_store_reader
from unbroken.ledger.store.sqlite import DATABASE_FILE
from unbroken.ledger.tree import StoredTree
from unbroken.runs.records.files import (
    FOLDER,
    find_conversation,
    find_expected,
    find_records,
    read_records,
)
from unbroken.runs.records.notes import Note, NoteKey, hash_lines, read_notes
from unbroken.runs.records.paths import cut_path, describe_branch, describe_session, find_runs

_logger = logging.getLogger(__name__)
TRAINING, EVALUATION, SESSION = "training", "evaluation", "session"
_EVALUATIONS = "evaluations"
_NUM_BUFFERED, _NUM_ENTRIES = 256, 4_000_000
"""Rows that are written together, and entries of their lists."""
_PAGE = 100
_OF_RESHAPED = "reshaped by "
_OF_TEMPERATURE = "sampled at temperature "
_MAX_SHOWN = 5
_ORIGIN = ("temperature", "step", "group", "trajectory", "branch", "tokenizer")
"""Of a row in the forms of others; the temperature is that to which its logprobs refer."""
_Rows = Iterable[dict[str, Any]]
_Item = TypeVar("_Item")
_Fields = Mapping[str, Set[str]]


class RowForm(StrEnum):
    """Whose rows."""

    ROWS = "rows"
    TRL = "trl"
    VERL = "verl"


class Rollout(NamedTuple):
    """A rollout as docs/rollouts.md describes it, and the first line of its file; `kind` may be an evaluation's set.

    `note` is what was noted of it in the viewer.
    """

    kind: str
    head: Mapping[str, Any]
    record: Mapping[str, Any]
    note: Note | None = None


def export_rows(
    source: str, target: Path, *, form: RowForm, steps: range | None = None, kind: str | None = None
) -> Counter[str]:
    """Write the rollouts of a run's folder or a gateway's store into a new file or folder; returns what was counted.

    Raises:
        InvalidInputError: there are no such rollouts, the target is there already, or a rollout does not fit the form.
        StoreError: the store cannot be read.
        ExportError: the target cannot be written.
    """
    if target.exists():
        raise InvalidInputError(f"TARGET must be new, and {target} is there already")
    if target.suffix == ".eval" and form is not RowForm.ROWS:
        raise InvalidInputError(f"--form must be left out with a target .eval, which is Inspect's format, got {form}")
    counts: Counter[str] = Counter()
    rollouts = _count(_find_rollouts(source, steps=steps, kind=kind), counts)
    with _explain_failures(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rows-", dir=target.parent) as folder:
            part = Path(folder) / "part"
            if target.suffix == ".eval":
                name = Path(source).name if "://" not in source else "sessions"
                _write_inspect(part, _require_some(rollouts, source, counts), name=name)
            else:
                rows = (row for rollout in rollouts for row in make_rows(rollout, form, counts))
                _write_rows(part, _require_some(rows, source, counts), form, target.suffix)
            part.replace(target)
    _warn_of_reshaped(counts, form)
    _warn_of_temperatures(counts, form)
    return counts


def _warn_of_reshaped(counts: Counter[str], form: RowForm) -> None:
    """Say which sampling parameters the rows of a form have lost, if they have."""
    if not counts["reshaped"]:
        return
    names = (
        f"{name.removeprefix(_OF_RESHAPED)} in {number}" for name, number in counts.items() if _OF_RESHAPED in name
    )
    _logger.warning(
        "--form %s has no place for what changed or cut the distribution of %d of %d rows (%s): their logprobs are of "
        "that distribution, and a trainer that computes its own without it would learn from a false ratio. Train on "
        "them as demonstrations only, take --form rows, or sample without",
        form,
        counts["reshaped"],
        counts["rows"],
        ", ".join(names),
    )


def _warn_of_temperatures(counts: Counter[str], form: RowForm) -> None:
    """Say which temperatures a trainer must be given: it computes the logprobs of its own, which is 1 by default."""
    found = [(name.removeprefix(_OF_TEMPERATURE), n) for name, n in counts.most_common() if _OF_TEMPERATURE in name]
    if not found:
        return
    shown = [f"{temperature} in {number}" for temperature, number in found[:_MAX_SHOWN]]
    if len(found) > _MAX_SHOWN:
        shown.append(f"{len(found) - _MAX_SHOWN} more")
    _logger.warning(
        "--form %s: the logprobs of %d of %d rows are of a temperature other than 1 (%s): give the trainer that "
        "`temperature`, each row has its own, or it would learn from a false ratio",
        form,
        sum(number for _, number in found),
        counts["rows"],
        ", ".join(shown),
    )


def _count_reshaped(turns: Sequence[Mapping[str, Any]], counts: Counter[str]) -> None:
    """Count a row whose ids were not sampled from the model's own distribution over all ids, and why."""
    names = {name for turn in turns for name in turn.get("controls") or ()} - {"stop_token_ids"}  # of min_tokens
    names |= {"top_k, top_p, min_p or a format" for turn in turns if turn.get("is_cut")}
    counts["reshaped"] += bool(names)
    counts.update(_OF_RESHAPED + name for name in sorted(names))


@contextlib.contextmanager
def _explain_failures(source: str, target: Path) -> Iterator[None]:
    """Name the target of an error of the disk, and the source of any other that its rollouts cause."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UnbrokenError):
            raise
        # Others write such files too: a null among the turns, half a surrogate pair, a number that Arrow cannot hold.
        found = f"{type(error).__name__}: {error}"
        raise InvalidInputError(f"{source} must have rollouts as docs/rollouts.md describes them: {found}") from error


def _require_some(items: Iterator[_Item], source: str, counts: Counter[str]) -> Iterator[_Item]:
    """The items, of which there is at least one; raises `InvalidInputError` otherwise, before a file is begun."""
    if (first := next(items, None)) is None:
        raise InvalidInputError(f"{source} has no rollouts of these steps{' with ids' if counts else ''}")
    return itertools.chain([first], items)


def _write_rows(path: Path, rows: _Rows, form: RowForm, suffix: str) -> None:
    """Write rows in the format that a file's name ends with; other names are a folder's."""
    writers = {".parquet": _write_parquet, ".jsonl": _write_lines}
    fields: _Fields = {}
    if form is RowForm.VERL and suffix != ".jsonl":
        fields = _find_fields(rows, kept := path.with_name("kept"))
        rows = _read_kept(kept)
    writers.get(suffix, _write_folder)(path, rows, form, fields)


def _count(rollouts: Iterable[Rollout], counts: Counter[str]) -> Iterator[Rollout]:
    for rollout in rollouts:
        counts["rollouts"] += 1
        counts["noted"] += rollout.note is not None
        yield rollout


def _find_rollouts(source: str, *, steps: range | None = None, kind: str | None = None) -> Iterator[Rollout]:
    """Read the rollouts of a run or a store, in the order of steps or of creation.

    `kind` is `training`, `evaluation` or the name of an evaluation's set; without it, those of training, and of a
    folder that has none those of evaluations.
    """
    if is_postgres_url(source) or (Path(source) / DATABASE_FILE).is_file():
        if steps is not None or kind is not None:
            raise InvalidInputError("--steps and --kind must be left out for a store, whose sessions have neither")
        return _read_store(source)
    folder = Path(source)
    if not (chosen := _choose_folders(folder, kind)):
        raise InvalidInputError(
            f"SOURCE must be the folder of a run with {kind or 'rollouts'}, or the store of a gateway "
            f"({DATABASE_FILE}), got {source}{_describe_inside(folder)}"
        )
    notes = _read_notes(folder)
    return itertools.chain.from_iterable(_read_files(name, each, steps, notes) for name, each in chosen)


def _describe_inside(folder: Path) -> str:
    """The evaluations inside of a folder that has no rollouts itself, for a message, or that there is no folder."""
    if not folder.is_dir():
        return ": there is no such folder"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{_EVALUATIONS}"))
    return f": {', '.join(inside)} in it have some" if inside else ""


def _read_notes(folder: Path) -> dict[NoteKey, Note]:
    """The notes that can be read. A line that was cut by a kill, or is of a later version, stops no export."""
    notes, problems = read_notes(folder)
    for problem in problems:
        print(f"unbroken: {folder}: {problem}", file=sys.stderr)
    return notes


def _choose_folders(run: Path, kind: str | None) -> list[tuple[str, Path]]:
    """The folders of a run with the rollouts of a kind, each with its name; empty if there are none."""
    if kind in (None, TRAINING) and find_records(run / FOLDER):
        return [(TRAINING, run / FOLDER)]
    sets = [each for each in sorted((run / _EVALUATIONS).glob("*")) if find_records(each)]
    return [(each.name, each) for each in sets if kind in (None, EVALUATION, each.name)]


def _read_files(kind: str, folder: Path, steps: range | None, notes: Mapping[NoteKey, Note]) -> Iterator[Rollout]:
    set_name = None if kind == TRAINING else kind
    noted = {(note.set, note.step) for note in notes.values()}
    for (step, _), path in find_records(folder).items():
        if steps is None or step in steps:
            records = read_records(path)
            head = next(records)
            hashes = _hash_rollouts(path, head) if (set_name, step) in noted else []
            for number, record in enumerate(records):
                _check_record(record, f"{path} must be a file of rollouts: rollout {number}")
                note = notes.get((set_name, step, hashes[number])) if number < len(hashes) else None
                yield Rollout(kind=kind, head=head, record=record, note=note)


def _hash_rollouts(path: Path, head: Mapping[str, Any]) -> list[str]:
    """What notes name the rollouts of a file by; where its head has columns, a line of texts comes before them."""
    return hash_lines(path)[1 if head.get("columns") is None else 2 :]


def _check_record(record: Mapping[str, Any], of: str) -> None:
    """Raise `InvalidInputError` for a record whose fields are not those that rows are made of: others may write it."""
    if not isinstance(trajectory := record.get("trajectory"), str):
        raise InvalidInputError(f"{of}: trajectory must be a string, got {trajectory!r:.100}")
    if not _is_number(record.get("reward")):
        raise InvalidInputError(f"{of}: reward must be null or a number, got {record['reward']!r:.100}")
    parts = record.get("reward_parts") or {}
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise InvalidInputError(f"{of}: reward_parts must be an object of numbers, got {parts!r:.100}")
    for name in ("rows", "turns", "messages"):
        items = record.get(name)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise InvalidInputError(f"{of}: {name} must be a list of objects, got {items!r:.100}")


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is null or a number."""
    return value is None or type(value) in (int, float)


def _read_store(location: str) -> Iterator[Rollout]:
    reader = open_store_reader(location)
    numbers = [number for number, _ in reader.list_numbers()]
    for first in range(0, len(numbers), _PAGE):
        page = numbers[first : first + _PAGE]
        for listed in reader.list_sessions(page[0], page[-1]):
            if (stored := reader.load(listed.session_id)) is not None:
                settings = stored.record.settings
                head = {"model": settings.get("tokenizer") or settings.get("model")}
                text = json.dumps(_make_record(stored), ensure_ascii=False)  # of half a surrogate pair: no UTF-8
                yield Rollout(kind=SESSION, head=head, record=json.loads(text.encode("utf-8", "replace")))


def _make_record(stored: StoredSession) -> dict[str, Any]:
    """A session as the record of a rollout, with the rows that a trainer would get of it."""
    grown = StoredTree.grow(stored)
    conversations, rows = grown.conversations, []
    for path, row in grown.tree.rows:
        cut = cut_path(path, len(row.token_ids))
        loss = [run[:2] for run in find_runs(row.loss_mask, where=row.loss_mask)]
        own = {"loss": loss, "temperature": row.temperature, "images": grown.find_images(cut)}
        rows.append({**describe_branch(cut, conversations), **own})
    metadata = stored.record.settings.get("metadata")
    return {**describe_session(stored), "rows": rows, "data": {"columns": metadata} if metadata else None}


def make_rows(rollout: Rollout, form: RowForm, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a rollout; one that sampled nothing has one without ids in the form `rows`, and none in others."""
    branches = list(enumerate(rollout.record["rows"]))
    if not branches and form is RowForm.ROWS:
        branches = [(0, {"token_ids": [], "segments": [], "rollout_logprobs": []})]
    for number, row in branches:
        counts["rows"] += 1
        if form is not RowForm.ROWS:
            _count_reshaped(_choose(rollout.record["turns"], row.get("turns")), counts)
            if (temperature := row.get("temperature")) not in (None, 1):
                counts[f"{_OF_TEMPERATURE}{temperature:g}"] += 1
        yield _FORMS[form](rollout, number, row)


def _make_row(rollout: Rollout, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a branch with all that is known of it; lists have an entry for each id, null where there is none."""
    head, record, length = rollout.head, rollout.record, len(row["token_ids"])
    # Each sampled id has its version: a completion's segment also has the ids that were given inside it.
    sampled = _expand(((*span[:2], True) for span in _list(row, "policy_versions")), length, False)
    # A session's branches are of several agents: the rows of one had the tools of another, whose turn was the last.
    turns = _choose(record["turns"], row.get("turns"))
    return {
        "kind": rollout.kind,
        "step": head.get("step"),
        "rank": head.get("rank"),
        "tokenizer": head.get("model"),
        **{name: record.get(name) for name in ("group", "trajectory", "status", "error", "reward", "wall_time_s")},
        "branch": number,
        "num_turns": len(turns),
        "finish_reasons": [turn["finish_reason"] for turn in turns],
        "num_given": [turn.get("num_given", 0) for turn in turns],
        "policies": [turn.get("policy") for turn in turns],
        "temperature": row.get("temperature"),
        "controls": [turn.get("controls") for turn in turns],
        "is_cut": [turn.get("is_cut") for turn in turns],
        "is_trained": row.get("is_trained"),
        "token_ids": row["token_ids"],
        "sampled_mask": sampled,
        "loss_mask": _expand(((*span[:2], True) for span in _list(row, "loss")), length, False),
        "rollout_logprobs": _place(row["rollout_logprobs"], sampled),
        "trainer_logprobs": _place(row.get("trainer_logprobs"), sampled),
        "policy_versions": _expand(_list(row, "policy_versions"), length, None),
        "advantages": _expand(_list(row, "advantages"), length, None),
        "reward_parts": record.get("reward_parts") or {},
        "images": _list(row, "images"),
        "messages": _choose(record["messages"], row.get("messages")),
        "tools": list(row.get("tools", record.get("tools")) or ()),
        "data": record.get("data"),
        **_describe_note(rollout),
    }


def _describe_note(rollout: Rollout) -> dict[str, Any]:
    """Not `labels`: trainers of transformers take a column of that name for their targets."""
    note = rollout.note
    return {"rollout_labels": note.labels if note else [], "rollout_note": note.text if note else None}


def _list(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A list of a row; empty where the row has none, as rows that were not trained on."""
    return row.get(name) or []


def _choose(items: Sequence[Any], numbers: Sequence[int] | None) -> Sequence[Any]:
    """The items of a branch, by their numbers in its rollout; all of them without numbers."""
    return items if numbers is None else [items[number] for number in numbers]


def _make_trl_row(rollout: Rollout, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's: a conversational prompt and completion, the ids of a `rollout_func`, and those of a tokenised data set.

    SFTTrainer takes `input_ids` with `assistant_masks` as they are.
    """
    whole, start, messages, first = _split(rollout, number, row)
    loss = [int(each) for each in whole["loss_mask"]]
    return {
        "prompt": messages[:first],
        "completion": messages[first:],
        "tools": json.dumps(whole["tools"]) if whole["tools"] else None,
        "prompt_ids": whole["token_ids"][:start],
        "completion_ids": whole["token_ids"][start:],
        "env_mask": loss[start:],
        "logprobs": [math.nan if each is None else each for each in whole["rollout_logprobs"][start:]],
        "input_ids": whole["token_ids"],
        "assistant_masks": loss,
        **{name: whole[name] for name in ("reward", *_ORIGIN)},
        **_describe_note(rollout),
    }


def _make_verl_row(rollout: Rollout, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """verl's: a row of its RLHFDataset, `messages` for its multi-turn SFT, and the fields of an `AgentLoopOutput`.

    Messages have only what they say: to templates, a field without a value is a field.
    """
    whole, start, messages, first = _split(rollout, number, row)
    messages = [{name: value for name, value in each.items() if value is not None} for each in messages]
    return {
        "data_source": rollout.kind,
        "prompt": messages[:first],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": find_expected(rollout.record.get("data")) or ""},
        "extra_info": {"split": rollout.kind, **{name: whole[name] for name in _ORIGIN}, **_describe_note(rollout)},
        "messages": messages,
        "tools": json.dumps(whole["tools"], ensure_ascii=False) if whole["tools"] else None,
        "prompt_ids": whole["token_ids"][:start],
        "response_ids": whole["token_ids"][start:],
        "response_mask": [int(each) for each in whole["loss_mask"][start:]],
        "response_logprobs": [each or 0.0 for each in whole["rollout_logprobs"][start:]],
        "reward_score": whole["reward"],
        "num_turns": sum(message["role"] != "system" for message in messages),
    }


def _split(
    rollout: Rollout, number: int, row: Mapping[str, Any]
) -> tuple[dict[str, Any], int, list[dict[str, Any]], int]:
    """The row, its first sampled id, its messages as text, for forms that have no images, and the first answer."""
    whole = _make_row(rollout, number, row)
    if whole["images"]:
        raise InvalidInputError(
            f"--form must be rows for rollouts with images, got {whole['trajectory']}: TRL and verl process images anew"
        )
    start, messages = whole["sampled_mask"].index(True), [_to_text_message(message) for message in whole["messages"]]
    places = {number: place for place, number in enumerate(row.get("messages") or range(len(messages)))}
    indices = (index for _, stop, index in _list(row, "message_indices") if stop <= start)
    given = max((places[index] for index in indices), default=-1)
    return whole, start, messages, _find_answer(messages, given + 1)


def _expand(spans: Iterable[Sequence[Any]], length: int, missing: Any) -> list[Any]:
    """[T] of spans `[start, stop, value]`."""
    values = [missing] * length
    for start, stop, value in spans:
        values[start:stop] = [value] * (stop - start)
    return values


def _place(values: Sequence[float] | None, sampled: Sequence[bool]) -> list[float | None] | None:
    """[T] of values of the sampled ids."""
    rest = iter(values or ())
    return None if values is None else [next(rest) if is_sampled else None for is_sampled in sampled]


def _find_answer(messages: Sequence[Mapping[str, Any]], num_first: int = 0) -> int:
    """The number of messages before the first answer that is not of the prompt, as the first `num_first` are."""
    rest = range(num_first, len(messages))
    return next((n for n in rest if messages[n]["role"] == "assistant"), len(messages))


def _to_text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(str(part.get("text", "")) for part in parts)


def _to_text_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of one shape, as Arrow's columns need: arguments of calls are JSON, as in OpenAI's form."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": text}})
    names = ("name", "tool_call_id", "reasoning_content")
    found = {"role": message["role"], "content": _to_text(message.get("content"))}
    return {**found, **{name: message.get(name) for name in names}, "tool_calls": calls or None}


_FORMS: dict[RowForm, Callable[[Rollout, int, Mapping[str, Any]], dict[str, Any]]] = {
    RowForm.ROWS: _make_row, RowForm.TRL: _make_trl_row, RowForm.VERL: _make_verl_row
}  # fmt: skip
_JSON_COLUMNS = frozenset({"reward_parts", "controls", "images", "messages", "tools", "data"})
"""Of the form `rows`: text with JSON where columns have types, because each rollout's has another shape."""


def _find_fields(rows: _Rows, kept: Path) -> _Fields:
    """Which fields verl's columns of messages and tools have: in Parquet, one that a row has is null in all others.

    The rows go into a file as they are read: when a store is read again it may have more, with other fields.
    """
    fields: dict[str, set[str]] = {"prompt": {"role", "content"}, "messages": {"role", "content"}, "tools": set()}
    with kept.open("w") as file:
        for row in rows:
            for column in ("prompt", "messages"):
                fields[column].update(*row[column])
            fields["tools"].update(["function"] if row["tools"] else [])
            file.write(json.dumps(row) + "\n")
    return fields


def _read_kept(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        yield from map(json.loads, file)


def _make_schema(columns: Iterable[str], form: RowForm, fields: _Fields) -> Any:
    import pyarrow as pa

    text, whole, flags, bits = pa.string(), pa.int64(), pa.list_(pa.bool_()), pa.list_(pa.int8())
    call = {"id": text, "type": text, "function": pa.struct({"name": text, "arguments": text})}
    names = ("role", "content", "name", "tool_call_id", "reasoning_content")
    message = {**dict.fromkeys(names, text), "tool_calls": pa.list_(pa.struct(call))}
    messages = {
        column: pa.list_(pa.struct({name: message[name] for name in message if name in fields.get(column, message)}))
        for column in ("prompt", "completion", "messages")
    }
    origin = dict(zip(_ORIGIN, (pa.float64(), whole, text, text, whole, text), strict=True))
    numbers = ("rollout_logprobs", "trainer_logprobs", "advantages", "logprobs", "response_logprobs")
    ids = ("token_ids", "policy_versions", "prompt_ids", "completion_ids", "input_ids", "response_ids")
    types: dict[str, Any] = {
        **dict.fromkeys(ids, pa.list_(pa.int32())), **dict.fromkeys(numbers, pa.list_(pa.float32())),
        **dict.fromkeys(("sampled_mask", "loss_mask", "is_cut"), flags), "is_trained": pa.bool_(),
        **dict.fromkeys(("env_mask", "assistant_masks", "response_mask"), bits),
        **dict.fromkeys(("finish_reasons", "policies", "rollout_labels"), pa.list_(text)),
        **dict.fromkeys(("step", "rank", "branch", "num_turns"), whole), "num_given": pa.list_(whole),
        **dict.fromkeys(("reward", "reward_score", "wall_time_s", "temperature"), pa.float64()),
        **messages,
        "reward_model": pa.struct({"style": text, "ground_truth": text}),
        "extra_info": pa.struct({"split": text, **origin, "rollout_labels": pa.list_(text), "rollout_note": text}),
    }  # fmt: skip
    as_text = _JSON_COLUMNS if form is RowForm.ROWS else ()
    columns = [name for name in columns if fields.get(name, True)]
    return pa.schema({name: text if name in as_text else types.get(name, text) for name in columns})


def _write_parquet(path: Path, rows: _Rows, form: RowForm, fields: _Fields) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise missing_extra(error, "Parquet files need the train extra", "train") from error
    with contextlib.ExitStack() as stack:
        writer: Any = None
        for batch in _batch(rows):
            if form is RowForm.ROWS:
                texts = [{name: json.dumps(row[name], ensure_ascii=False) for name in _JSON_COLUMNS} for row in batch]
                batch = [row | text for row, text in zip(batch, texts, strict=True)]
            schema = _make_schema(batch[0], form, fields)
            writer = writer or stack.enter_context(pq.ParquetWriter(path, schema, compression="zstd"))
            writer.write_table(pa.Table.from_pylist(batch, schema))


def _batch(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    num_entries = 0
    for row in rows:
        batch.append(row)
        num_entries += sum(len(value) for value in row.values() if isinstance(value, list))
        if len(batch) == _NUM_BUFFERED or num_entries >= _NUM_ENTRIES:
            yield batch
            batch, num_entries = [], 0
    if batch:
        yield batch


def _write_lines(path: Path, rows: _Rows, form: RowForm, _: _Fields) -> None:
    with path.open("w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            if form is RowForm.TRL:  # JSON has no NaN
                row["logprobs"] = [None if math.isnan(each) else each for each in row["logprobs"]]
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_folder(path: Path, rows: _Rows, form: RowForm, fields: _Fields) -> None:
    """A folder for `datasets.load_from_disk`, by way of a Parquet file."""
    file, cache = path.with_name("rows.parquet"), path.with_name("cache")
    _write_parquet(file, rows, form, fields)
    import datasets

    try:
        found = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(cache))
        found.save_to_disk(path)
    except datasets.exceptions.DatasetGenerationError as error:
        raise OSError(f"{error.__cause__ or error}") from error


def _write_inspect(path: Path, rollouts: Iterable[Rollout], *, name: str) -> None:
    """A log of Inspect (version 2, a ZIP file): a sample for each rollout, and its ids in the sample's metadata."""
    epochs: Counter[str] = Counter()
    models: dict[str, None] = {}
    summaries: list[dict[str, Any]] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log:

        def add(file: str, value: Any) -> None:
            log.writestr(file, json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))

        for rollout in rollouts:
            group, step = rollout.record.get("group") or rollout.record["trajectory"], rollout.head.get("step")
            problem = str(group if step is None else f"{rollout.kind}-{step}-{group}").replace("/", "-")
            epochs[problem] += 1
            models[str(rollout.head.get("model"))] = None
            sample = _make_inspect_sample(rollout, problem, epochs[problem])
            add(f"samples/{problem}_epoch_{epochs[problem]}.json", sample)
            names = ("id", "epoch", "target", "scores", "total_time")
            question = sample["input"][-1]["content"] if sample["input"] else ""
            kept = {each: sample[each] for each in names}
            summaries.append({**kept, "input": _to_text(question)[:200], "completed": True})
        now = datetime.now(UTC).isoformat(timespec="seconds")
        spec = {
            "created": now, **dict.fromkeys(("task", "task_id", "run_id", "eval_id"), name), "model": ", ".join(models),
            "dataset": {"name": name, "samples": len(epochs), "sample_ids": list(epochs)},
            "config": {"epochs": max(epochs.values(), default=1)},
        }  # fmt: skip
        start = {"version": 2, "eval": spec, "plan": {"name": "plan", "steps": []}}
        results = {
            "total_samples": len(summaries), "completed_samples": len(summaries), "scores": _sum_scores(summaries)
        }  # fmt: skip
        add("_journal/start.json", start)
        add("summaries.json", summaries)
        stats = {"started_at": now, "completed_at": now}
        add("header.json", {**start, "status": "success", "results": results, "stats": stats})


def _sum_scores(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The mean of each score, over the samples that have it."""
    found: dict[str, list[float]] = {}
    for summary in summaries:
        for name, score in summary["scores"].items():
            found.setdefault(name, []).append(score["value"])
    return [
        {"name": name, "scorer": name, "scored_samples": len(values),
         "metrics": {"mean": {"name": "mean", "value": math.fsum(values) / len(values)}}}
        for name, values in found.items()
    ]  # fmt: skip


_STOPS = {"stop": "stop", "length": "max_tokens"}


def _make_inspect_sample(rollout: Rollout, problem: str, epoch: int) -> dict[str, Any]:
    """A rollout as a sample of Inspect: problems are its ids, and siblings its epochs."""
    record = rollout.record
    messages = [_to_inspect_message(message, n) for n, message in enumerate(find_conversation(record))]
    answers = [message for message in messages if message["role"] == "assistant"]
    rows = [_make_row(rollout, number, row) for number, row in enumerate(record["rows"])]
    left_out = {"messages", "tools", "data", "reward", "reward_parts", "kind", "step", "rank"}
    left_out |= {"rollout_labels", "rollout_note"}
    model = str(rollout.head.get("model"))
    stops = [_STOPS.get(turn["finish_reason"], "unknown") for turn in record["turns"][-1:]]
    choices = [{"message": answer, "stop_reason": stop} for answer, stop in zip(answers[-1:], stops, strict=False)]
    names = ("status", "error", "trajectory", "group", "tools", "data")
    return {
        "id": problem,
        "epoch": epoch,
        "input": messages[: _find_answer(messages)],
        "target": find_expected(record.get("data")) or "",
        "messages": messages,
        "output": {"model": model, "choices": choices},
        "scores": _list_scores(record),
        "metadata": {
            "kind": rollout.kind,
            "step": rollout.head.get("step"),
            **{name: record.get(name) for name in names},
            **_describe_note(rollout),
            "rows": [{name: value for name, value in row.items() if name not in left_out} for row in rows],
        },
        "total_time": record.get("wall_time_s"),
    }


def _list_scores(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The reward and its parts as scores of Inspect, which are numbers: a function without an opinion has none."""
    scores = {"reward": record.get("reward"), **(record.get("reward_parts") or {})}
    return {name: {"value": float(value)} for name, value in scores.items() if isinstance(value, (int, float))}


def _to_inspect_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    plain = _to_text_message(message)
    role = plain["role"] if plain["role"] in ("system", "user", "assistant", "tool") else "system"
    found: dict[str, Any] = {"id": str(number), "role": role, "content": plain["content"]}
    if (thought := plain["reasoning_content"]) is not None:
        found["content"] = [{"type": "reasoning", "reasoning": thought}, {"type": "text", "text": plain["content"]}]
    if role == "tool":
        found |= {"tool_call_id": plain["tool_call_id"], "function": plain["name"]}
    if plain["tool_calls"]:
        calls = enumerate(plain["tool_calls"])
        found["tool_calls"] = [
            {"id": call["id"] or f"call-{number}-{n}", "function": call["function"]["name"], "type": "function",
             **_parse_arguments(call["function"]["arguments"])}
            for n, call in calls
        ]  # fmt: skip
    return found


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return {"arguments": {}, "parse_error": f"{error}: {text}"}
    return {"arguments": arguments if isinstance(arguments, dict) else {"value": arguments}}
