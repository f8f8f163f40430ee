"""What `HttpEngine` gives over a stock vLLM server: over its stand-in and over vLLM's own application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.servers import listening
from support.stock_server import StockServer, is_sorted
from unbroken.engines.base import Engine
from unbroken.engines.http import HttpEngine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import ContextOverflowError, SamplingError
from unbroken.types import FinishReason, SampleChunk, SampleRequest, SamplingParams, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

VOCAB_SIZE = 64
CONTEXT_LENGTH = 256
PROMPT_IDS = token_ids([1, 2, 3, 4, 5])


def script(prompt_ids: Any) -> list[int]:
    return np.random.default_rng(int(prompt_ids.sum())).integers(0, VOCAB_SIZE, CONTEXT_LENGTH).tolist()


async def vllm_app(engine: Any) -> Any:
    """vLLM's own application over an engine that runs."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    level = logging.getLogger().level
    model = engine._llm.model_config.model
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, "--enable-scale-out"])
    app = build_app(args, ("generate",), engine._llm.model_config)
    await init_app_state(engine._llm, app.state, args, ("generate",))
    logging.getLogger().setLevel(level)  # vLLM's application sets it, for all loggers of this process
    return app


@pytest.fixture(params=["stand-in", "vllm"])
def behind(request: pytest.FixtureRequest) -> Any:
    """The engine behind the server."""
    if request.param == "vllm":
        return request.getfixturevalue("shared_vllm").engine
    return ScriptedEngine(script, context_length=CONTEXT_LENGTH, vocab_size=VOCAB_SIZE)


@pytest_asyncio.fixture(loop_scope="session")
async def engine(behind: Any) -> AsyncIterator[HttpEngine]:
    app = StockServer(behind).make_app() if isinstance(behind, ScriptedEngine) else await vllm_app(behind)
    async with listening(app) as url:
        connected = await HttpEngine.connect([url], vocab_size=VOCAB_SIZE, max_retries=0)
        yield connected
        await connected.close()


def ask(request_id: str = "a", *, n: int = 1, prompt_ids: Any = PROMPT_IDS, **params: Any) -> SampleRequest:
    return SampleRequest(request_id=request_id, prompt_ids=prompt_ids, n=n, params=SamplingParams(**params))


async def test_it_is_an_engine(engine: HttpEngine) -> None:
    assert isinstance(engine, Engine)
    assert (engine.context_length, engine.vocab_size, engine.takes_images) == (CONTEXT_LENGTH, VOCAB_SIZE, False)
    await engine.check_health()


async def test_completions_have_logprobs_versions_and_their_prompt(engine: HttpEngine) -> None:
    request = ask(n=2, max_tokens=6)
    result = await engine.sample(request)
    result.check_answers(request)
    for sequence in result.sequences:
        assert (len(sequence.completion_ids), sequence.finish_reason) == (6, FinishReason.LENGTH)
        assert sequence.policy_versions.tolist() == [engine.policy_version] * 6
        assert (sequence.rollout_logprobs <= 0).all()


async def test_a_server_that_does_not_report_its_queue_has_no_time_in_it(engine: HttpEngine) -> None:
    assert (await engine.sample(ask(max_tokens=2))).sequences[0].queue_s is None
    assert [chunk.queue_s async for chunk in engine.stream(ask(max_tokens=1))][-1] is None


async def test_a_stream_joined_is_the_same_as_the_whole(engine: HttpEngine) -> None:
    request = ask(max_tokens=9, temperature=0.0, num_top_logprobs=2)
    (whole,) = (await engine.sample(request)).sequences
    chunks = [chunk async for chunk in engine.stream(request)]
    joined = SampleChunk.join(chunks, temperature=1.0)
    assert joined.completion_ids.tolist() == whole.completion_ids.tolist()
    np.testing.assert_allclose(joined.rollout_logprobs, whole.rollout_logprobs, atol=1e-5)
    assert joined.version_spans == whole.version_spans
    assert len(chunks) > 1


async def test_a_stop_id_ends_a_completion_and_is_its_last_id(engine: HttpEngine) -> None:
    (free,) = (await engine.sample(ask(max_tokens=9, temperature=0.0))).sequences
    stop_id = int(free.completion_ids[3])
    request = ask(max_tokens=9, temperature=0.0, stop_token_ids=(stop_id,))
    (sequence,) = (await engine.sample(request)).sequences
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.completion_ids[-1] == stop_id
    assert stop_id not in sequence.completion_ids[:-1]


async def test_the_most_likely_ids_come_in_order(engine: HttpEngine) -> None:
    (sequence,) = (await engine.sample(ask(max_tokens=5, num_top_logprobs=3))).sequences
    tops = sequence.top_logprobs
    assert tops is not None
    assert tops.token_ids.shape == (5, 3)
    assert is_sorted(tops.logprobs)
    assert (tops.logprobs[:, 0] >= sequence.rollout_logprobs - 1e-5).all()


async def test_scores_have_one_logprob_for_each_id_after_the_first(engine: HttpEngine) -> None:
    scored = await engine.score(PROMPT_IDS, num_top_logprobs=2)
    assert scored.logprobs.shape == (4,)
    assert scored.top_logprobs is not None
    assert scored.top_logprobs.token_ids.shape == (4, 2)
    assert len((await engine.score(PROMPT_IDS[:1])).logprobs) == 0
    with pytest.raises(SamplingError, match="temperature must be 1 to score"):
        await engine.score(PROMPT_IDS, temperature=0.5)


async def test_it_refuses_what_no_engine_takes(engine: HttpEngine) -> None:
    with pytest.raises(ContextOverflowError):
        await engine.sample(ask(prompt_ids=[1] * CONTEXT_LENGTH))
    with pytest.raises(SamplingError, match="prompt_ids must lie in"):
        await engine.sample(ask(prompt_ids=[VOCAB_SIZE]))


async def test_many_at_once_get_their_own_answers(engine: HttpEngine) -> None:
    requests = [ask(f"{k}/0", prompt_ids=[k + 1, 2], max_tokens=4, temperature=0.0) for k in range(8)]
    alone = [await engine.sample(request) for request in requests]
    together = await asyncio.gather(*(engine.sample(request) for request in requests))
    for one, other in zip(alone, together, strict=True):
        assert one.sequences[0].completion_ids.tolist() == other.sequences[0].completion_ids.tolist()


async def test_a_stream_that_is_left_and_an_abort_end_their_requests(engine: HttpEngine) -> None:
    async with aclosing(engine.stream(ask("left", max_tokens=200))) as chunks:
        assert len((await anext(chunks)).completion_ids)
    task = asyncio.create_task(engine.sample(ask("aborted", max_tokens=200)))
    await asyncio.sleep(0.01)
    await engine.abort("aborted")
    (sequence,) = (await task).sequences
    assert sequence.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert len((await engine.sample(ask("next", max_tokens=3))).sequences[0].completion_ids) == 3
