"""From a prompt back to its row of the data set: TRL tells a rollout the prompt and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from unbroken.errors import InvalidInputError


class Rows(Protocol):
    """A data set with rows by number, such as a `datasets.Dataset`."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class RowsByPrompt:
    """The rows of a data set, found by their `prompt`: `RowsByPrompt(dataset)[prompt]["answer"]`."""

    def __init__(self, dataset: Rows) -> None:
        """Read all rows once.

        Raises:
            InvalidInputError: two rows have one prompt and differ in something else, so that a prompt alone does not
                say which is meant.
        """
        self._dataset = dataset
        self._numbers: dict[str, int] = {}
        for number, row in enumerate(dataset):
            first = self._numbers.setdefault(_key(row["prompt"]), number)
            if first != number and dataset[first] != row:
                raise InvalidInputError(
                    f"rows {first} and {number} have the same prompt and differ otherwise, and TRL tells a rollout "
                    f"only the prompt: make them differ in it. The prompt is {row['prompt']!r}"
                )

    def __getitem__(self, prompt: str | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The row of a prompt as TRL gives it.

        Raises:
            InvalidInputError: no row has it.
        """
        number = self._numbers.get(_key(prompt))
        if number is None:
            raise InvalidInputError(
                f"none of {len(self._numbers)} prompts is {prompt!r}: give the data set that TRL has"
            )
        return self._dataset[number]


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)
