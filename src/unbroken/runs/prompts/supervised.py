"""The supervised rows of a run's `warm_start.data`: conversations, or rows that `unbroken export` wrote.

    {"messages": [..], "tools": [..]}                                  rendered once, with the run's renderer
    {"token_ids": [..], "loss_mask": [..], "tokenizer": "Qwen/.."}     as they are, if the tokenizer has the same ids

Which of the two a row is, its columns say. A row that cannot be shown to be exact is refused, by its number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError, TemplateError
from unbroken.progress import advance, begin
from unbroken.rendering.base import Renderer
from unbroken.rendering.loader import find_other_token, load_tokenizer
from unbroken.rollout.conversations import make_conversation_rows
from unbroken.rollout.seeds import EpochOrder
from unbroken.runs.config import RunConfig
from unbroken.runs.processes import Rank
from unbroken.runs.prompts.dataset import DataConfig, load_data, read_messages
from unbroken.runs.prompts.images import UndecodedRows
from unbroken.training.objective.supervised import make_supervised_row
from unbroken.training.warm_start import WarmStart
from unbroken.types import TrainingSample, token_ids
from unbroken.untrusted import MAX_FACTS_BYTES, MAX_ROWS_BYTES, read_file, read_json

_MESSAGES, _IDS = ("messages", "tools"), ("token_ids", "loss_mask", "tokenizer", "images")
"""The columns that are read."""


def load_warm_start(
    config: RunConfig, *, source: str, renderer: Renderer, context_length: int | None, rank: Rank
) -> WarmStart | None:
    """Load and render the supervised rows of a run, for the model in `source`; None if it has none.

    Raises:
        InvalidInputError: there is no such data set, or a row of it cannot be trained exactly.
    """
    if (settings := config.warm_start) is None:
        return None
    begin(f"rendering {settings.data}")
    conversations = list(_Rows(str(settings.data), source=source, renderer=renderer, context_length=context_length))
    if rank.index == 0:
        rows = [row for of_one in conversations for row in of_one]
        num_ids, num_trained = sum(len(row.token_ids) for row in rows), sum(int(row.loss_mask.sum()) for row in rows)
        what = f"{len(conversations)} conversations in {len(rows)} rows, {num_trained} of {num_ids} ids are trained"
        print(f"supervised rows: {what}", flush=True)
    return WarmStart(
        conversations=conversations,
        order=EpochOrder(len(conversations), seed=config.seed, shuffle=True),
        num_steps=settings.steps,
        per_step=config.rollouts.problems_per_step,
        learning_rate=settings.learning_rate,
        weight=settings.weight,
        process=rank.index,
        num_processes=rank.num_processes,
    )


class _Rows:
    """The training rows of each row of a data set."""

    def __init__(self, data: str, *, source: str, renderer: Renderer, context_length: int | None) -> None:
        self._data = data
        self._source = source
        self._renderer = renderer
        self._context_length = context_length
        self._known = {source}
        """Models whose tokenizers give each id the same text as that of `source`."""

    def __iter__(self) -> Iterator[Sequence[TrainingSample]]:
        for number, row in enumerate(_iterate_cells(self._data)):
            try:
                yield self._make(row)
            except (InvalidInputError, TemplateError) as error:
                raise InvalidInputError(f"row {number} of {self._data} cannot be trained: {error}") from error
            advance()

    def _make(self, row: Mapping[str, Any]) -> Sequence[TrainingSample]:
        made = self._render(row) if row.get("token_ids") is None else [self._read_ids(row)]
        longest = max(len(each.token_ids) for each in made)
        if self._context_length is not None and longest > self._context_length:
            raise InvalidInputError(
                f"it has {longest} ids, and the model's context {self._context_length}: leave it out, or its last turns"
            )
        return made

    def _render(self, row: Mapping[str, Any]) -> list[TrainingSample]:
        messages, tools = (_read_json(row.get(name), name) for name in _MESSAGES)
        if not isinstance(messages, list):
            raise InvalidInputError(f"it must have token_ids or a list of messages, got {messages!r:.100}")
        return make_conversation_rows(
            read_messages(messages, place="messages"), tools=tools or (), renderer=self._renderer
        )

    def _read_ids(self, row: Mapping[str, Any]) -> TrainingSample:
        """A row of an export."""
        self._check_tokenizer(row.get("tokenizer"))
        if images := _read_json(row.get("images"), "images"):
            raise InvalidInputError(f"images must be empty, because supervised rows have none, got {images!r:.100}")
        ids, mask = (_read_list(row.get(name), kind, name) for name, kind in (("token_ids", int), ("loss_mask", bool)))
        if len(ids) != len(mask) or not any(mask) or mask[0]:
            raise InvalidInputError(
                f"loss_mask must have an entry for each of {len(ids)} token_ids, with at least one true and the first "
                f"false, got {sum(mask)} true in {len(mask)}: only rows that were trained have some"
            )
        if min(ids) < 0 or max(ids) >= 2**31:
            raise InvalidInputError(f"token_ids must be in [0, 2^31), got {min(ids)} to {max(ids)}")
        end = max(place for place, is_trained in enumerate(mask) if is_trained) + 1  # later ids only cost time
        return make_supervised_row(token_ids(ids[:end]), np.array(mask[:end]))

    def _check_tokenizer(self, name: Any) -> None:
        """Raise `InvalidInputError` unless this model's tokenizer has the same ids as that of the run's model."""
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"tokenizer must name the model whose ids these are, got {name!r}")
        if name in self._known:
            return
        own, other = load_tokenizer(self._source), load_tokenizer(name)
        # A teacher may know more tokens than the policy; of a row any may be in the ids, so both must know the same.
        for first, second, of, model in ((own, other, self._source, name), (other, own, name, self._source)):
            if (difference := find_other_token(first, second)) is not None:
                raise InvalidInputError(
                    f"tokenizer must have the ids of {self._source}, and {model} has {difference} in {of}: export "
                    "messages instead"
                )
        self._known.add(name)


def _iterate_cells(data: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a file of JSON lines as they are, or of another data set as `datasets` has them."""
    path = Path(data)
    if path.suffix == ".jsonl" and os.path.lexists(path):
        yield from _iterate_lines(path)
        return
    chosen = DataConfig(file=path) if path.exists() else DataConfig(hub=data)
    rows = load_data(chosen, field="warm_start.data")
    names = [name for name in (*_MESSAGES, *_IDS) if name in rows.column_names]
    yield from UndecodedRows(rows, names, fills_keys=chosen.fills_keys)


def _iterate_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = read_file(path, max_bytes=MAX_ROWS_BYTES).splitlines()
    except OSError as error:
        raise InvalidInputError(f"warm_start.data must be a file of JSON lines, got {path}: {error}") from None
    if not lines:
        raise InvalidInputError(f"{path} must have at least one row, but the file is empty")
    for number, line in enumerate(lines):
        try:
            row = read_json(line, max_bytes=MAX_FACTS_BYTES)
        except InvalidInputError as error:
            raise InvalidInputError(f"row {number} of {path} cannot be read: {error}") from None
        if not isinstance(row, dict):
            raise InvalidInputError(f"row {number} of {path} must be an object, got {type(row).__name__}")
        yield row


def _read_list(cell: Any, kind: type[Any], name: str) -> list[Any]:
    """A cell that is a list of values of this type."""
    if not isinstance(cell, list) or any(type(each) is not kind for each in cell):
        raise InvalidInputError(f"{name} must be a list of {kind.__name__}, got {cell!r:.100}")
    return cell


def _read_json(cell: Any, name: str) -> Any:
    """A cell, which in a column of text is JSON, as in a Parquet file that `unbroken export` wrote."""
    if not isinstance(cell, str):
        return cell
    try:
        return read_json(cell, max_bytes=MAX_FACTS_BYTES)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name} must be a list, or the JSON of one: {error}") from None
