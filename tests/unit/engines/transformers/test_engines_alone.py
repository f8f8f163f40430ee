"""What one request asks for costs that request: the others go on, and nothing of it is left."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.waits import wait_until
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.engines.transformers.batch import MAX_MASK
from unbroken.errors import EngineError, SamplingError
from unbroken.types import SampleRequest, SamplingParams, token_ids

VOCABULARY = 64


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2**20,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def ask(name: str, length: int, *, max_tokens: int = 8, **params: Any) -> SampleRequest:
    ids = token_ids(np.arange(length) * 7 % VOCABULARY)
    return SampleRequest(
        request_id=name, prompt_ids=ids, params=SamplingParams(max_tokens=max_tokens, seed=1, **params)
    )


async def sample(engine: TransformersEngine, request: SampleRequest) -> list[int]:
    return (await engine.sample(request)).sequences[0].completion_ids.tolist()


def fail_from(model: Any, position: int, *, num_ids: int) -> None:
    """Let passes that read so far have no memory; 1 id is a pass that samples, 2 or more one over a prompt."""

    def check(module: Any, args: Any, kwargs: Any) -> None:
        positions = kwargs["position_ids"]
        if positions.max() >= position and min(positions.shape[1], 2) == num_ids:
            raise torch.OutOfMemoryError("no memory for this pass")

    model.base_model.register_forward_pre_hook(check, with_kwargs=True)


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """Let this process take at most so many bytes more."""
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmSize:")[1].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


async def test_the_stop_ids_of_a_request_leave_nothing_in_the_engine() -> None:
    engine = TransformersEngine(make_model())

    def count_bytes() -> int:
        return sum(one.nbytes for one in vars(engine._batch._table).values() if isinstance(one, np.ndarray))

    await sample(engine, ask("few", 5))
    before = count_bytes()
    await sample(engine, ask("many", 5, stop_token_ids=tuple(range(VOCABULARY))))
    assert count_bytes() == before
    await engine.close()


async def test_more_stop_ids_than_the_vocabulary_has_are_refused_with_both_numbers() -> None:
    engine = TransformersEngine(make_model())
    with pytest.raises(SamplingError, match=r"stop_token_ids must be at most 64 ids.* got 1000000"):
        await engine.sample(ask("many", 5, stop_token_ids=(1,) * 10**6))
    await engine.close()


async def test_a_long_prompt_makes_no_mask_of_its_length_squared() -> None:
    model = make_model()
    sizes: list[int] = []

    def measure(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(kwargs["attention_mask"].numel())

    engine = TransformersEngine(model, config=TransformersEngineConfig(max_prefill_tokens=2**20, max_batch=1))
    model.base_model.register_forward_pre_hook(measure, with_kwargs=True)
    await sample(engine, ask("long", 12_000, max_tokens=1))
    assert max(sizes) <= MAX_MASK < 12_000**2
    await engine.close()


async def test_others_do_not_wait_for_the_passes_of_a_long_prompt() -> None:
    model = make_model()
    sizes: list[int] = []

    def measure(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(kwargs["attention_mask"].numel())

    engine = TransformersEngine(model, config=TransformersEngineConfig(max_prefill_tokens=2**20, max_batch=8))
    expected = await sample(engine, ask("alone", 20, max_tokens=40))
    model.base_model.register_forward_pre_hook(measure, with_kwargs=True)
    long = asyncio.create_task(sample(engine, ask("long", 100_000)))
    await wait_until(lambda: sizes)
    num_before = len(sizes) + 1
    assert await sample(engine, ask("short", 20, max_tokens=40)) == expected
    during = sizes[num_before:]
    assert len(during) >= 40
    assert max(during) <= MAX_MASK // 4
    assert sum(size > 10_000 for size in during) <= 30, "each of 40 ids waited for a pass over the long prompt"
    await engine.abort("long")
    assert await long == []
    await engine.close()


async def test_a_long_row_that_samples_is_in_no_pass_of_many_short_ones() -> None:
    model = make_model()
    sizes: list[int] = []

    def measure(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["position_ids"].shape[1] == 1:
            sizes.append(kwargs["attention_mask"].numel())

    engine = TransformersEngine(model, config=TransformersEngineConfig(max_prefill_tokens=256))
    model.base_model.register_forward_pre_hook(measure, with_kwargs=True)
    await sample(engine, ask("first", 10_000, max_tokens=1))
    calls = [sample(engine, ask("long", 10_000, max_tokens=30))]
    calls += [sample(engine, ask(f"short {k}", 20, max_tokens=30)) for k in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unbroken.engines.transformers.batch.MAX_MASK", 2**16)
        await asyncio.gather(*calls)
    assert max(sizes) <= 10_100
    await engine.close()


@pytest.mark.parametrize("num_ids", [1, 2])
async def test_a_pass_without_memory_fails_its_longest_request_and_no_other(num_ids: int) -> None:
    model = make_model()
    engine = TransformersEngine(model)
    expected = await sample(engine, ask("alone", 20))
    fail_from(model, 90, num_ids=num_ids)
    await engine.pause()
    calls = [sample(engine, ask("short", 20)), sample(engine, ask("long", 100)), engine.resume()]
    short, long, _ = await asyncio.gather(*calls, return_exceptions=True)
    assert short == expected
    assert isinstance(long, EngineError)
    assert "memory is too small for request 'long', whose prompt has 100 ids" in str(long)
    assert await sample(engine, ask("later", 20)) == expected
    await engine.check_health()
    await engine.close()


async def test_a_prompt_whose_keys_and_values_do_not_fit_costs_that_request_only() -> None:
    engine = TransformersEngine(make_model(), config=TransformersEngineConfig(max_prefill_tokens=64))
    expected = await sample(engine, ask("alone", 20, max_tokens=100))
    await engine.pause()
    with address_space(256 * 2**20):
        calls = [
            sample(engine, ask("short", 20, max_tokens=100)),
            sample(engine, ask("long", 500_000)),
            engine.resume(),
        ]
        short, long, _ = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(long, EngineError)
    assert "memory is too small for request 'long'" in str(long)
    assert short == expected
    assert await sample(engine, ask("later", 20, max_tokens=100)) == expected
    await engine.close()
