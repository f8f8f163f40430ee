"""Finds the row of a prompt: TRL passes only the prompt to a rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from unbroken.errors import InvalidInputError


class Rows(Protocol):
    """A data set with numbered rows, such as a `datasets.Dataset`."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class RowsByPrompt:
    """The rows of a data set by their `prompt`: `RowsByPrompt(dataset)[prompt]["answer"]`."""

    def __init__(self, dataset: Rows) -> None:
        """Read all rows once.

        Raises:
            InvalidInputError: two different rows have the same prompt, so that a prompt does not identify its row.
        """
        self._dataset = dataset
        self._numbers: dict[str, int] = {}
        for number, row in enumerate(dataset):
            first = self._numbers.setdefault(_key(row["prompt"]), number)
            if first != number and dataset[first] != row:
                raise InvalidInputError(
                    f"rows {first} and {number} differ but have the same prompt, and TRL passes only the prompt to a "
                    f"rollout: make the prompts different. The prompt is {row['prompt']!r}"
                )

    def __getitem__(self, prompt: str | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Find the row of a prompt.

        Raises:
            InvalidInputError: no row has this prompt.
        """
        number = self._numbers.get(_key(prompt))
        if number is None:
            raise InvalidInputError(
                f"no row of {len(self._numbers)} has the prompt {prompt!r}: give the data set that TRL has"
            )
        return self._dataset[number]


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)
