"""Scoring, whichever engine or server it is."""

from __future__ import annotations

from typing import Any

import pytest

from support.engine_subjects import CONTEXT_LENGTH, PROMPT_IDS, VOCAB_SIZE, Subject
from unbroken.engines.base import ScoringEngine
from unbroken.errors import SamplingError
from unbroken.types import token_ids

# One loop for all, because the one vLLM engine of a session lives in it.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.engine(kind=ScoringEngine)]


async def test_score_gives_one_logprob_for_each_id_after_the_first(sampler: Subject) -> None:
    logprobs = (await sampler.engine.score(PROMPT_IDS)).logprobs
    assert logprobs.shape == (4,)
    assert (logprobs <= 0).all()
    assert (await sampler.engine.score(PROMPT_IDS[:1])).logprobs.shape == (0,)


@pytest.mark.parametrize(
    ("bad_ids", "temperature"),
    [
        ([], 1.0),
        ([VOCAB_SIZE], 1.0),
        ([1] * (CONTEXT_LENGTH + 1), 1.0),
        *(([1, 2], temperature) for temperature in (0.0, 1e-40, 1e300, float("nan"), None)),
    ],
)
async def test_what_cannot_be_scored_is_refused(sampler: Subject, bad_ids: list[int], temperature: Any) -> None:
    with pytest.raises(SamplingError):
        await sampler.engine.score(token_ids(bad_ids), temperature=temperature)


async def test_scoring_gives_the_most_likely_ids_where_asked(subject: Subject) -> None:
    scored = await subject.engine.score(PROMPT_IDS, temperature=0.7, num_top_logprobs=3)
    assert scored.top_logprobs is not None
    assert scored.top_logprobs.logprobs.shape == (4, 3)
    assert (scored.logprobs <= scored.top_logprobs.logprobs[:, 0] + 1e-6).all()
