"""What retokenising would have changed in the rollouts of an evaluation: shares by cause, and ratios.

A rollout is compared up to its last turn. Turns that a fork left behind are in rows of their own, and only counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, SamplingError
from unbroken.retokenising.changes import Cause
from unbroken.retokenising.comparison import Counts, Retokenised, TemplateTexts, count_changed, count_compared
from unbroken.retokenising.ratios import Ratios, score_rollouts
from unbroken.retokenising.records import retokenise_record
from unbroken.training.metrics.mismatch import Mismatch


async def summarize_retokenised(
    records: Iterable[Mapping[str, Any]], texts: TemplateTexts, engine: Engine, *, temperature: float
) -> dict[str, Any]:
    """Compare recorded rollouts, and score both forms with the weights that sampled them, if the engine can.

    Returns plain values (docs/drift.md). Raises `EngineError` if the engine fails.
    """
    rollouts: list[Retokenised] = []
    left_out: Counter[str] = Counter()
    for record in records:
        found = await asyncio.to_thread(retokenise_record, record, texts)
        if isinstance(found, str):
            left_out[found] += 1
        else:
            rollouts.append(found)
    ratios, why_none = await _score(rollouts, engine, temperature)
    whole = count_compared(rollouts)
    return {
        "compared": asdict(whole),
        "changed": _describe(count_changed(rollouts), whole),
        "causes": {cause.value: _describe(count_changed(rollouts, cause), whole) for cause in Cause},
        "left_out": dict(left_out),
        "num_turns_left_out": sum(each.num_turns_left_out for each in rollouts),
        "exact": _describe_mismatch(ratios.exact),
        "retokenised": _describe_mismatch(ratios.retokenised),
        "num_unscored": ratios.num_unscored,
        "why_unscored": why_none,
    }


async def _score(rollouts: list[Retokenised], engine: Engine, temperature: float) -> tuple[Ratios, str | None]:
    """The ratios, or why there are none."""
    known = [each for each in rollouts if each.rollout_logprobs is not None]
    if not known:
        return Ratios(num_unscored=len(rollouts)), "no rollout was compared with its logprobs"
    try:
        # Greedy ids have the logprobs of temperature 1.
        ratios = await score_rollouts(known, engine, temperature=temperature or 1.0)
    except (InvalidInputError, SamplingError) as error:  # an engine that does not score, or not at this temperature
        return Ratios(num_unscored=len(rollouts)), str(error)
    num_unscored = ratios.num_unscored + len(rollouts) - len(known)
    return Ratios(exact=ratios.exact, retokenised=ratios.retokenised, num_unscored=num_unscored), None


def _describe(counts: Counts, whole: Counts) -> dict[str, Any]:
    return {
        **asdict(counts),
        "share_of_rollouts": _divide(counts.num_rollouts, whole.num_rollouts),
        "share_of_turns": _divide(counts.num_turns, whole.num_turns),
        "share_of_ids": _divide(counts.num_ids, whole.num_ids),
    }


def _describe_mismatch(found: Mismatch | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _divide(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
