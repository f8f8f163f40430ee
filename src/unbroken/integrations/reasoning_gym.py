"""Data sets of the PyPI package `reasoning-gym` as problems, with its scores as rewards.

    environment = "unbroken.integrations.reasoning_gym:ReasoningGymEnv"
    environment_arguments = { dataset = "leg_counting", options = { max_animals = 4 } }

The package is imported for the first problem.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.messages import Message, get_text
from unbroken.rollout.env import EnvStart
from unbroken.rollout.seeds import derive_problem_seed
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool
from unbroken.threads import run_in_daemon_thread

INSTRUCTION = "Write your final answer between <answer> and </answer>."


class ReasoningGymEnv(ToolEnv):
    """One question, with tools if there are any. `score_answer` of its data set gives the reward.

    Problem k is item k of `reasoning_gym.create_dataset(dataset, seed=..., **options)`, whose seed depends on the run's
    and on the split.
    """

    def __init__(
        self,
        dataset: str,
        number: int = 0,
        split: str = "train",
        seed: int = 0,
        *,
        options: Mapping[str, Any] | None = None,
        instruction: str = INSTRUCTION,
        tools: Sequence[Tool] = (),
    ) -> None:
        """Prepare a problem. `options` are those of the data set, without size and seed.

        With an empty `instruction` the whole reply is the answer.
        """
        super().__init__([], tools, self.score)
        self._make = functools.partial(
            _create_dataset, dataset, options or {}, seed=derive_problem_seed(seed, split, 0), number=number
        )
        self._number = number
        self._instruction = instruction
        self._dataset: Any = None
        self._entry: Any = None

    async def start(self) -> EnvStart:
        """Generate the question, in a thread.

        Raises:
            InvalidInputError: the package is missing, has no such data set, or refuses the options.
        """
        self._dataset = await run_in_daemon_thread(self._make)
        self._entry = await run_in_daemon_thread(lambda: self._dataset[self._number])
        question = "\n\n".join(filter(None, [self._entry["question"], self._instruction]))
        return replace(await super().start(), messages=[{"role": "user", "content": question}])

    def score(self, messages: Sequence[Message]) -> float:
        """The score of the answer in the last message, usually from 0 to 1. No answer is scored as None."""
        text = get_text(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else ""
        return float(self._dataset.score_answer(answer=self._find_answer(text), entry=self._entry))

    def _find_answer(self, text: str) -> str | None:
        if not self._instruction:
            return text.strip() or None
        found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
        return found[-1].strip() if found else None


def _create_dataset(name: str, options: Mapping[str, Any], *, seed: int, number: int) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise missing_extra(error, f"dataset={name!r} needs the package reasoning-gym", "reasoning-gym") from error
    for given in ("seed", "size"):
        if given in options:
            raise InvalidInputError(f"options.{given} must be left out: the run gives it, got {options[given]!r}")
    try:
        return package.create_dataset(name, **options, seed=seed, size=number + 1)
    except (ValueError, TypeError, AssertionError) as error:
        raise InvalidInputError(
            f"reasoning-gym does not make dataset={name!r} with options={dict(options)!r}: {type(error).__name__}: "
            f"{error}"
        ) from error
