"""The ratios that training on the retokenised ids would have seen, with one scoring pass of the same weights.

An id that is still there has the ratio of its probability in the retokenised sequence to the one it was sampled with. A
stretch that was replaced counts as one ratio: of all its new ids to all sampled ids that they replace (to 1 where ids
were inserted). A stretch that is only left out has none: nothing is trained there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.engines.base import Engine
from unbroken.engines.checks import require_scoring
from unbroken.progress import advance
from unbroken.retokenising.changes import Gap
from unbroken.retokenising.comparison import Retokenised
from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.types import TokenIds

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, as trainers cut them, so that a changed stretch cannot make k3 infinite."""
_MAX_SCORING = 16
"""Sequences that are scored at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """The same rollouts as they were sampled, and retokenised; None without an id to compare."""

    exact: Mismatch | None = None
    retokenised: Mismatch | None = None
    num_unscored: int = 0
    """Rollouts whose retokenised form does not fit into the engine's context; both leave them out."""


async def score_rollouts(rollouts: Sequence[Retokenised], engine: Engine, *, temperature: float = 1.0) -> Ratios:
    """Score all rollouts in both forms. Raises as `Engine.score` does."""
    limit, scoring = asyncio.Semaphore(_MAX_SCORING), require_scoring(engine)

    async def score(ids: TokenIds) -> NDArray[Any]:
        """[T] with NaN for the first id, which nothing predicts."""
        async with limit:
            scored = await scoring.score(ids, temperature=temperature)
        advance()
        return np.concatenate([[np.nan], scored.logprobs]).astype(np.float64)

    fitting = [one for one in rollouts if len(one.retokenised_ids) <= engine.context_length]
    exact = await asyncio.gather(*(score(one.token_ids) for one in fitting))
    changed = iter(await asyncio.gather(*(score(one.retokenised_ids) for one in fitting if one.differs)))
    exact_pairs: list[tuple[float, float]] = []
    retokenised_pairs: list[tuple[float, float]] = []
    for one, own in zip(fitting, exact, strict=True):
        exact_pairs += pair_logprobs(one, own, ())
        gaps = [change.gap for change in one.changes]
        retokenised_pairs += pair_logprobs(one, next(changed) if one.differs else own, gaps)
    return Ratios(
        exact=_compare(exact_pairs), retokenised=_compare(retokenised_pairs), num_unscored=len(rollouts) - len(fitting)
    )


def pair_logprobs(rollout: Retokenised, logprobs: NDArray[Any], gaps: Sequence[Gap]) -> Iterator[tuple[float, float]]:
    """The logprobs (trained on, sampled) of each sampled id, and the sums of each replaced stretch.

    `logprobs` are [T] those of the other sequence, to which the gaps lead. Worked example: `a b c d` was sampled
    after `p`, and `p a x d` is trained on: three pairs, of `a`, of `x` against `b c`, and of `d`.
    """
    mask, sampled = rollout.sampled_mask, rollout.rollout_logprobs
    assert sampled is not None, "a conversation that no engine sampled has no ratios"
    end = Gap(before=(len(mask), len(mask)), after=(len(logprobs), len(logprobs)))
    position = other = 0
    for gap in (*gaps, end):
        (start, stop), (first, last) = gap.before, gap.after
        kept = np.flatnonzero(mask[position:start])
        yield from zip(logprobs[other + kept].tolist(), sampled[position + kept].tolist(), strict=True)
        follows_sampled = start == stop and start > 0 and bool(mask[start - 1])
        if first < last and (follows_sampled or mask[start:stop].any()):
            replaced = sampled[start:stop][mask[start:stop]]
            yield float(np.nansum(logprobs[first:last])), float(replaced.sum())
        position, other = stop, last


def _compare(pairs: list[tuple[float, float]]) -> Mismatch | None:
    if not pairs:
        return None
    trained, sampled = np.asarray(pairs).T
    return mismatch(sampled + np.clip(trained - sampled, -MAX_LOG_RATIO, MAX_LOG_RATIO), sampled)
