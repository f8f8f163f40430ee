"""Evaluations of a run: their lines, and ones that wait for training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from unbroken.runs.evaluation.evaluator import Evaluator


def read_evaluations(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's evaluations."""
    return [json.loads(line) for line in (output / "evaluation.jsonl").read_text().splitlines()]


def count_steps(output: Path) -> int:
    """The number of steps that a run has made."""
    metrics = output / "metrics" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_steps(patch: pytest.MonkeyPatch, output: Path) -> None:
    """Let evaluations after steps 3 to 5 wait until two more steps are made, before they sample; or until the sixth,
    after which a run waits for them.
    """
    sample = Evaluator.sample

    async def slow(self: Evaluator) -> Any:
        begun = count_steps(output)
        while 3 <= begun < 6 and count_steps(output) < min(begun + 2, 6):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await sample(self)

    patch.setattr(Evaluator, "sample", slow)
