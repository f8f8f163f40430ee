"""However requests are batched, each gets what it would get alone.

The guarantee, exactly: a seeded request spends its own uniform numbers, one for each id, whatever runs beside it. So
its ids can differ only where such a number falls within rounding error of the border between two ids: how a batch is
made up changes logits in their last bits. These models compute in float64, where that is about 1e-15, so that the ids
must be equal; in float32 it is about 1e-7 for each id sampled.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.architectures import tiny_model
from support.effort import num_cases
from unbroken.engines.transformers.batch import ContinuousBatch
from unbroken.engines.transformers.forward import SlotForward
from unbroken.engines.transformers.jobs import Job
from unbroken.engines.transformers.worker import Answer, Outbox
from unbroken.types import SampledSequence, SampleRequest, SamplingParams

CONTEXT_LENGTH = 96
STEMS = [np.random.default_rng(k).integers(0, 64, 60, dtype=np.int32) for k in range(2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request, and how many steps are made before it comes."""

    steps_before: int
    stem: int
    stem_length: int
    own_ids: tuple[int, ...]
    params: SamplingParams
    n: int

    def request(self, number: int) -> SampleRequest:
        prompt_ids = np.concatenate([STEMS[self.stem][: self.stem_length], np.array(self.own_ids, dtype=np.int32)])
        return SampleRequest(request_id=str(number), prompt_ids=prompt_ids, params=self.params, n=self.n)


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 8),
    temperature=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    top_k=st.sampled_from([0, 0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**32),
    stop_token_ids=st.sampled_from([(), (), (3, 9, 27)]),
)
arrivals_strategy = st.lists(
    st.builds(
        Arrival,
        steps_before=st.integers(0, 4),
        stem=st.integers(0, 1),
        stem_length=st.integers(0, 60),
        own_ids=st.lists(st.integers(0, 63), min_size=1, max_size=6).map(tuple),
        params=params_strategy,
        n=st.integers(1, 2),
    ),
    min_size=1,
    max_size=8,
)


@functools.cache
def forward_pass(architecture: str) -> SlotForward:
    with torch.inference_mode():
        return SlotForward(tiny_model(architecture).double(), context_length=CONTEXT_LENGTH)


async def sample(
    architecture: str, arrivals: Sequence[tuple[int, SampleRequest]], max_batch: int, max_prefill_tokens: int
) -> list[tuple[SampledSequence, ...]]:
    """Submit the requests after their numbers of steps, in a batch of their own."""
    outbox = Outbox()
    batch = ContinuousBatch(
        forward_pass(architecture),
        max_batch=max_batch,
        context_length=CONTEXT_LENGTH,
        max_prefill_tokens=max_prefill_tokens,
        decode=None,
    )
    jobs = []
    for steps_before, request in arrivals:
        for _ in range(steps_before):
            batch.step()
        jobs.append(Job(request, Answer(outbox)))
        batch.submit(jobs[-1])
    while batch.has_work:
        batch.step()
    outbox.flush()
    return [(await job.answer.future).sequences for job in jobs]


@settings(max_examples=num_cases(10, in_fuzz=400), derandomize=True)
@given(
    architecture=st.sampled_from(["qwen3", "gpt2"]),
    arrivals=arrivals_strategy,
    max_batch=st.integers(1, 6),
    max_prefill_tokens=st.sampled_from([1, 16, 4096]),
)
def test_a_seeded_request_gets_the_same_ids_alone_and_in_any_batch(
    architecture: str, arrivals: list[Arrival], max_batch: int, max_prefill_tokens: int
) -> None:
    async def compare() -> None:
        requests = [arrival.request(number) for number, arrival in enumerate(arrivals)]
        steps = [arrival.steps_before for arrival in arrivals]
        together = await sample(architecture, list(zip(steps, requests, strict=True)), max_batch, max_prefill_tokens)
        for request, found in zip(requests, together, strict=True):
            (alone,) = await sample(architecture, [(0, request)], 1, 4096)
            assert len(found) == request.n
            for sequence, expected in zip(found, alone, strict=True):
                assert sequence.completion_ids.tolist() == expected.completion_ids.tolist()
                assert sequence.finish_reason is expected.finish_reason
                np.testing.assert_allclose(sequence.rollout_logprobs, expected.rollout_logprobs, atol=1e-6)

    asyncio.run(compare())
