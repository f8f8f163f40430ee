"""Engines of every kind for the contract tests, with requests for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.architectures import tiny_model
from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.types import SampledSequence, SampleRequest, SamplingParams, token_ids

VOCAB_SIZE = 64
CONTEXT_LENGTH = 256
PROMPT_IDS = token_ids([1, 2, 3, 4, 5])
SCRIPTED_QUEUE_S = 0.25
"""What the scripted engine reports as the time in its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    engine: Engine
    num_sampled: Callable[[], int]
    weights: list[tuple[str, Any]]
    """Other weights than it has now; none if it takes none, or computes nothing."""
    make_model: Callable[[int], Any] = lambda seed: tiny_model(seed=seed)
    """The model with the weights of this seed."""
    poll_s: float = 0.0
    """How long to wait between two looks at the number of ids; a spinning loop would keep other processes waiting."""

    async def wait_for_ids(self, number: int) -> None:
        until = self.num_sampled() + number
        async with asyncio.timeout(60):  # vLLM's first request warms it up
            while self.num_sampled() < until:  # noqa: ASYNC110  # engines announce no single ids
                await asyncio.sleep(self.poll_s)


def scripted() -> Subject:
    def script(prompt_ids: Any) -> ScriptedReply:
        ids = np.random.default_rng(int(prompt_ids.sum())).integers(0, VOCAB_SIZE, CONTEXT_LENGTH)
        return ScriptedReply(completion_ids=token_ids(ids), queue_s=SCRIPTED_QUEUE_S)

    engine = ScriptedEngine(script, context_length=CONTEXT_LENGTH, vocab_size=VOCAB_SIZE)
    return Subject(engine=engine, num_sampled=lambda: engine.num_sampled, weights=[])


def embedded() -> Subject:
    engine = TransformersEngine(
        tiny_model(), config=TransformersEngineConfig(max_batch=8, context_length=CONTEXT_LENGTH)
    )
    weights = list(tiny_model(seed=1).named_parameters())
    return Subject(engine=engine, num_sampled=lambda: engine.stats.num_sampled, weights=weights)


SUBJECTS = {"scripted": scripted, "embedded": embedded}
"""Engines that a test makes in its own process."""


def on_vllm(engine: Any) -> Subject:
    """vLLM samples in other processes: ids are counted when their step is known here."""
    from support.vllm_engines import tiny_vllm_model

    weights = list(tiny_vllm_model(seed=engine.policy_version + 1).named_parameters())
    return Subject(
        engine=engine, num_sampled=lambda: engine.num_sampled, weights=weights, make_model=tiny_vllm_model, poll_s=0.001
    )


def ask(request_id: str = "a", *, n: int = 1, prompt_ids: Any = PROMPT_IDS, **params: Any) -> SampleRequest:
    params.setdefault("seed", 7)
    return SampleRequest(request_id=request_id, prompt_ids=prompt_ids, n=n, params=SamplingParams(**params))


async def sample_one(subject: Subject, request: SampleRequest) -> SampledSequence:
    result = await subject.engine.sample(request)
    result.check_answers(request)
    return result.sequences[0]
