"""Prompts from a file or the hub, loaded with the `datasets` library.

Row k of a run is row `order(k // n)[k % n]` of the n rows: each epoch has its own order, which depends only on the seed
and the epoch. So one number says where a run is.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError, MessagesError
from unbroken.messages import Message, check_conversation

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data set with the prompts."""

    file: Path | None = None
    """A file with a row for each prompt: .jsonl, .json, .parquet or .csv."""
    hub: str | None = None
    """Instead of a file: the name of a data set on the hub, such as openai/gsm8k."""
    subset: str | None = None
    """The subset, if the data set on the hub has several."""
    split: str = "train"
    """The split, or a part of it such as train[:1000]."""
    prompt: str = "prompt"
    """The column with the prompts: text, or messages."""
    tools: str | None = None
    """The column with the names of the tools that each prompt may use; if left out, all tools."""
    system: str | None = None
    """A system message for prompts that are text."""
    shuffle: bool = True
    """Whether each epoch has its own random order; otherwise every epoch has the order of the rows."""

    def __post_init__(self) -> None:
        if (self.file is None) == (self.hub is None):
            raise InvalidInputError(f"exactly one of file and hub must be given, got file={self.file}, hub={self.hub}")
        if self.file is not None and self.file.suffix not in _LOADERS:
            raise InvalidInputError(f"file must be one of {', '.join(_LOADERS)}, got {self.file}")


class Rows:
    """The rows of a data set, all checked when they are loaded."""

    def __init__(self, config: DataConfig, *, seed: int) -> None:
        """Load and check the rows.

        Raises:
            InvalidInputError: there is no such data set, it is empty, or it lacks a column.
            MessagesError: the prompt of a row is neither text nor messages.
        """
        self.name = str(config.file or config.hub)
        self._config = config
        self._seed = seed
        self._rows = _load(config, self.name)
        self.columns = tuple(self._rows.column_names)
        for field, column in (("prompt", config.prompt), ("tools", config.tools)):
            if column is not None and column not in self.columns:
                raise InvalidInputError(
                    f"{self.name} must have the column {column!r}, which {field} names: its columns are "
                    f"{', '.join(self.columns)}"
                )
        digest = hashlib.sha256()
        for number, prompt in enumerate(self._rows[config.prompt]):
            self._check_prompt(number, prompt)
            digest.update(json.dumps(prompt, sort_keys=True, default=str).encode())
        self.source = f"{len(self)} rows with the prompts {digest.hexdigest()[:16]}"
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        return len(self._rows)

    def index(self, number: int) -> int:
        """The index in the data set of row `number` of the run."""
        epoch, place = divmod(number, len(self))
        return int(self._order(epoch)[place])

    def row(self, number: int) -> Mapping[str, Any]:
        """All columns of row `number` of the run."""
        found: Mapping[str, Any] = self._rows[self.index(number)]
        return found

    def prompt(self, number: int) -> str | list[Message]:
        """The prompt of row `number` of the run, as it is in the data set."""
        prompt: str | list[Message] = self.row(number)[self._config.prompt]
        return prompt

    def messages(self, number: int) -> list[Message]:
        """The prompt of row `number` of the run as messages."""
        prompt = self.prompt(number)
        if not isinstance(prompt, str):
            return [_drop_missing_keys(message) for message in prompt]
        system: list[Message] = []
        if self._config.system is not None:
            system = [{"role": "system", "content": self._config.system}]
        return [*system, {"role": "user", "content": prompt}]

    def check_tools(self, known: Collection[str]) -> None:
        """Raise `InvalidInputError` if a row's tools are not a list of known names."""
        if self._config.tools is None:
            return
        for number, names in enumerate(self._rows[self._config.tools]):
            if not isinstance(names, list) or not set(names) <= set(known):
                raise InvalidInputError(
                    f"{self.name}, row {number}, column {self._config.tools!r} must be a list of names of tools, got "
                    f"{names!r}: the tools are {', '.join(known) or 'not given'}"
                )

    def tools(self, number: int) -> list[str] | None:
        """The names of the tools of row `number` of the run; None: all tools."""
        return None if self._config.tools is None else self.row(number)[self._config.tools]

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._config.shuffle:
            return np.arange(len(self))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self))

    def _check_prompt(self, number: int, prompt: Any) -> None:
        place = f"{self.name}, row {number}, column {self._config.prompt!r}"
        if isinstance(prompt, str) and prompt.strip():
            return
        if isinstance(prompt, str) or not isinstance(prompt, list):
            raise MessagesError(f"{place} must be text or messages, got {prompt!r}")
        try:
            check_conversation([_drop_missing_keys(message) for message in prompt])
        except (MessagesError, AttributeError) as error:
            raise MessagesError(f"{place} must be text or messages: {error}") from None


def _load(config: DataConfig, name: str) -> Any:
    try:
        if config.file is None:
            return datasets.load_dataset(config.hub, config.subset, split=config.split)
        if not config.file.is_file():
            raise InvalidInputError(f"the data set {name} cannot be loaded: there is no such file")
        if config.file.stat().st_size == 0:
            raise InvalidInputError(f"{config.file} must have at least one row, but the file is empty")
        return datasets.load_dataset(
            _LOADERS[config.file.suffix], data_files=str(config.file.resolve()), split=config.split
        )
    except (DatasetGenerationError, OSError, ConnectionError) as error:
        cause = error.__cause__ or error
        raise InvalidInputError(f"the data set {name} cannot be loaded: {type(cause).__name__}: {cause}") from error
    except ValueError as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"the data set {name} cannot be loaded: {error}") from error


def _drop_missing_keys(message: Any) -> Message:
    """Remove the keys that a message got only because other messages in its column have them."""
    found: Message = {key: value for key, value in message.items() if value is not None or key == "content"}  # type: ignore[assignment]
    return found
