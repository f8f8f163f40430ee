"""The supervised rows of a run's `warm_start.data`: conversations, or rows that `unbroken export` wrote.

    {"messages": [..], "tools": [..]}                                  rendered once, with the run's renderer
    {"token_ids": [..], "loss_mask": [..], "tokenizer": "Qwen/.."}     as they are, if the tokenizer has the same ids

Which of the two a row is, its columns say. A row that cannot be shown to be exact is refused, by its number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError, TemplateError
from unbroken.progress import advance, begin
from unbroken.rendering.base import Renderer
from unbroken.rendering.loader import load_tokenizer
from unbroken.rollout.conversations import make_conversation_rows
from unbroken.rollout.seeds import EpochOrder
from unbroken.runs.config import RunConfig
from unbroken.runs.processes import Rank
from unbroken.runs.prompts.dataset import DataConfig, load_data, read_messages
from unbroken.runs.prompts.images import UndecodedRows
from unbroken.training.objective.supervised import make_supervised_row
from unbroken.training.warm_start import WarmStart
from unbroken.types import TrainingSample, token_ids
from unbroken.untrusted import MAX_FACTS_BYTES, read_json

_logger = logging.getLogger(__name__)
_MESSAGES, _IDS = ("messages", "tools"), ("token_ids", "loss_mask", "tokenizer", "images")


def load_warm_start(
    config: RunConfig, *, source: str, renderer: Renderer, context_length: int | None, rank: Rank
) -> WarmStart | None:
    """Load and render the rows of the run's warm start, for the model in `source`; None if it has none.

    Raises:
        InvalidInputError: there is no such data set, or a row of it cannot be trained exactly.
    """
    if (settings := config.warm_start) is None:
        return None
    begin(f"rendering {settings.data}")
    conversations = list(_Rows(str(settings.data), source=source, renderer=renderer, context_length=context_length))
    if rank.index == 0:
        rows = [row for of_one in conversations for row in of_one]
        _logger.info(
            "%s: %d conversations in %d rows, %d ids, of which %d are trained",
            settings.data,
            len(conversations),
            len(rows),
            sum(len(row.token_ids) for row in rows),
            sum(int(row.loss_mask.sum()) for row in rows),
        )
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
        self._same_ids: dict[str, bool] = {source: True}
        """Whether the tokenizer of a model gives each id the same text as that of `source`."""
        path = Path(data)
        chosen = DataConfig(file=path) if path.exists() else DataConfig(hub=data)
        rows = load_data(chosen, field="warm_start.data")
        self._is_exact = set(_IDS[:3]) <= set(rows.column_names)
        if not self._is_exact and _MESSAGES[0] not in rows.column_names:
            raise InvalidInputError(
                f"warm_start.data must have the column messages, or {', '.join(_IDS[:3])} as `unbroken export` writes "
                f"them, and {data} has {', '.join(rows.column_names)}"
            )
        names = [name for name in (_IDS if self._is_exact else _MESSAGES) if name in rows.column_names]
        self._rows = UndecodedRows(rows, names, fills_keys=chosen.fills_keys)

    def __iter__(self) -> Iterator[Sequence[TrainingSample]]:
        for number, row in enumerate(self._rows):
            try:
                made = [self._read_ids(row)] if self._is_exact else self._render(row)
            except (InvalidInputError, TemplateError) as error:
                raise InvalidInputError(f"row {number} of {self._data} cannot be trained: {error}") from error
            longest = max(len(each.token_ids) for each in made)
            if self._context_length is not None and longest > self._context_length:
                raise InvalidInputError(
                    f"row {number} of {self._data} cannot be trained: it has {longest} ids, and the model's context "
                    f"{self._context_length}: leave it out, or its last turns"
                )
            advance()
            yield made

    def _render(self, row: Mapping[str, Any]) -> list[TrainingSample]:
        messages, tools = (_read_json(row.get(name), name) for name in _MESSAGES)
        if not isinstance(messages, list):
            raise InvalidInputError(f"messages must be a list of messages, got {messages!r:.100}")
        return make_conversation_rows(
            read_messages(messages, place="messages"), tools=tools or (), renderer=self._renderer
        )

    def _read_ids(self, row: Mapping[str, Any]) -> TrainingSample:
        """A row of an export."""
        ids, mask, tokenizer, images = (row.get(name) for name in _IDS)
        self._check_tokenizer(tokenizer)
        if images := _read_json(images, "images"):
            raise InvalidInputError(f"images must be empty, got {len(images)}: supervised rows have none")
        if not (isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)):
            raise InvalidInputError(
                "token_ids and loss_mask must be lists of one length, got "
                f"{' and '.join(str(len(each)) if isinstance(each, list) else repr(each)[:50] for each in (ids, mask))}"
            )
        if not all(type(each) is bool for each in mask) or not any(mask) or mask[0]:
            raise InvalidInputError(
                "loss_mask must be of true and false, with at least one true and the first false, got "
                f"{sum(each is True for each in mask)} true in {len(mask)}: only rows that were trained have some"
            )
        if not all(type(each) is int for each in ids):
            raise InvalidInputError("token_ids must be whole numbers")
        end = max(place for place, is_trained in enumerate(mask) if is_trained) + 1  # later ids only cost time
        return make_supervised_row(token_ids(ids[:end]), np.array(mask[:end]))

    def _check_tokenizer(self, name: Any) -> None:
        """Raise `InvalidInputError` unless this model's tokenizer has the same ids as that of the run's model."""
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"tokenizer must name the model whose ids these are, got {name!r}")
        if name not in self._same_ids:
            own, other = (load_tokenizer(each).get_vocab() for each in (self._source, name))
            self._same_ids[name] = own == other
        if not self._same_ids[name]:
            raise InvalidInputError(
                f"tokenizer must have the ids of {self._source}, and {name} has others: export messages instead"
            )


def _read_json(cell: Any, name: str) -> Any:
    """A cell, which in a column of text is JSON, as in a Parquet file that `unbroken export` wrote."""
    if not isinstance(cell, str):
        return cell
    try:
        return read_json(cell, max_bytes=MAX_FACTS_BYTES)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name} must be a list, or the JSON of one: {error}") from None
