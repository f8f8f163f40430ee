"""An engine with what every engine has and nothing else: it is streamed, and the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from unbroken.engines.base import (
    Engine,
    PausableEngine,
    ScoringEngine,
    StreamingEngine,
    UpdatableEngine,
    stream_request,
)
from unbroken.engines.checks import require_pausable, require_scoring, require_updatable
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import ContextOverflowError, InvalidInputError
from unbroken.types import FinishReason, SampleRequest, SamplingParams, token_ids


class CoreEngine:
    takes_images = takes_structured_output = False

    def __init__(self) -> None:
        inner = ScriptedEngine(lambda prompt_ids: [5, 6, 2], context_length=8, vocab_size=64)
        self.context_length, self.vocab_size, self.policy_version = inner.context_length, inner.vocab_size, 0
        self.check_health, self.sample, self.abort, self.close = (
            inner.check_health,
            inner.sample,
            inner.abort,
            inner.close,
        )


def ask(prompt_ids: list[int], n: int = 1) -> SampleRequest:
    return SampleRequest(
        request_id="a", prompt_ids=token_ids(prompt_ids), n=n, params=SamplingParams(stop_token_ids=(2,))
    )


def test_it_is_an_engine_and_no_other_kind() -> None:
    engine = CoreEngine()
    assert isinstance(engine, Engine)
    for kind in (StreamingEngine, ScoringEngine, PausableEngine, UpdatableEngine):
        assert not isinstance(engine, kind)


async def test_it_is_streamed_with_one_chunk_for_each_completion() -> None:
    chunks = [chunk async for chunk in stream_request(CoreEngine(), ask([1], n=2))]
    assert [(chunk.index, chunk.completion_ids.tolist()) for chunk in chunks] == [(0, [5, 6, 2]), (1, [5, 6, 2])]
    assert {chunk.finish_reason for chunk in chunks} == {FinishReason.STOP}


async def test_a_stream_of_it_raises_what_sampling_raises() -> None:
    with pytest.raises(ContextOverflowError):
        await anext(stream_request(CoreEngine(), ask([1] * 8)))


@pytest.mark.parametrize(
    ("require", "message"),
    [
        (require_scoring, "CoreEngine cannot score given ids"),
        (require_pausable, "CoreEngine cannot pause"),
        (require_updatable, "CoreEngine takes no new weights"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(require: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        require(CoreEngine())
