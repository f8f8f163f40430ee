"""What `HttpEngine` gives over a stock vLLM server beyond what all engines have in common."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from support.engine_subjects import PROMPT_IDS, Subject, ask, sample_one
from unbroken.errors import SamplingError
from unbroken.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(params=["stock_subject", "stock_vllm_subject"])
def stock(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


async def test_a_server_that_does_not_report_its_queue_has_no_time_in_it(stock: Subject) -> None:
    assert not stock.engine.takes_images
    await stock.engine.check_health()
    assert (await sample_one(stock, ask(max_tokens=2))).queue_s is None
    assert [chunk.queue_s async for chunk in stock.engine.stream(ask(max_tokens=1))][-1] is None


async def test_scores_have_a_temperature_of_1(stock: Subject) -> None:
    scored = await stock.engine.score(PROMPT_IDS, num_top_logprobs=2)
    assert scored.top_logprobs is not None
    assert scored.top_logprobs.token_ids.shape == (4, 2)
    with pytest.raises(SamplingError, match="temperature must be 1 to score"):
        await stock.engine.score(PROMPT_IDS, temperature=0.5)


async def test_a_stream_that_is_left_and_an_abort_end_their_requests(stock: Subject) -> None:
    async with aclosing(stock.engine.stream(ask("left", max_tokens=200))) as chunks:
        assert len((await anext(chunks)).completion_ids)
    task = asyncio.create_task(stock.engine.sample(ask("aborted", max_tokens=200)))
    await asyncio.sleep(0.01)
    await stock.engine.abort("aborted")
    (sequence,) = (await task).sequences
    assert sequence.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert len((await sample_one(stock, ask("next", max_tokens=3))).completion_ids) == 3
