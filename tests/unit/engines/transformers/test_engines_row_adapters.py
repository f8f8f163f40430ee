"""Adapters by name in the embedded engine: each row of a batch samples with its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from support.adapted import with_lora
from support.models import tiny_qwen3
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import SamplingError
from unbroken.training.model.weights import gather_adapter_weights, gather_weights
from unbroken.types import Numerics, SampleRequest, SampleResult, SamplingParams
from unbroken.weights.sources import TensorSource

PROMPT = np.arange(1, 30) % 16
PARAMS = SamplingParams(max_tokens=12, seed=5)


def adapter(seed: int) -> list[tuple[str, Any]]:
    return list(gather_adapter_weights(with_lora(tiny_qwen3(), seed=seed)))


def both(left: int, right: int) -> TensorSource:
    tensors = [
        (f"{name}/{key}", each) for name, seed in (("left", left), ("right", right)) for key, each in adapter(seed)
    ]
    return TensorSource(tensors)


async def ask(engine: TransformersEngine, name: str | None) -> SampleResult:
    return await engine.sample(SampleRequest(request_id=f"{name}", prompt_ids=PROMPT, params=PARAMS, adapter=name))


async def merged(seed: int) -> SampleResult:
    """What an engine samples whose weights have the adapter merged into them."""
    engine = TransformersEngine(tiny_qwen3())
    await engine.update_weights(TensorSource(gather_weights(with_lora(tiny_qwen3(), seed=seed))), policy_version=1)
    found = await ask(engine, None)
    await engine.close()
    return found


async def test_rows_of_one_batch_are_sampled_each_with_its_own_adapter() -> None:
    engine = TransformersEngine(tiny_qwen3())
    plain = await ask(engine, None)
    with pytest.raises(SamplingError, match="this engine has no adapters, got adapter 'left'"):
        await ask(engine, "left")
    await engine.update_weights(both(1, 2), policy_version=1)
    left, right, base = await asyncio.gather(ask(engine, "left"), ask(engine, "right"), ask(engine, None))
    for found, expected in ((left, await merged(1)), (right, await merged(2)), (base, plain)):
        sampled, alone = found.sequences[0], expected.sequences[0]
        assert sampled.completion_ids.tolist() == alone.completion_ids.tolist()
        assert np.abs(sampled.rollout_logprobs - alone.rollout_logprobs).max() < 1e-5
    assert left.sequences[0].completion_ids.tolist() != right.sequences[0].completion_ids.tolist()
    assert left.sequences[0].version_spans[0].policy_version == 1
    assert engine.adapters == ("left", "right")
    await engine.close()


async def test_with_exact_numerics_rows_have_the_same_bits_in_one_batch_alone_and_by_kept_keys() -> None:
    engine = TransformersEngine(tiny_qwen3(), config=TransformersEngineConfig(numerics=Numerics.EXACT))
    await engine.update_weights(both(1, 2), policy_version=1)
    names = ("left", None, "right")
    together = await asyncio.gather(*(ask(engine, name) for name in names))
    again = [await ask(engine, name) for name in names]
    assert engine.stats.num_reused > 0
    await engine.update_weights(both(3, 2), policy_version=2)
    changed = [await ask(engine, name) for name in names]
    bits = [[each.sequences[0].rollout_logprobs.tobytes() for each in found] for found in (together, again, changed)]
    assert bits[0] == bits[1]
    assert [one == other for one, other in zip(bits[1], bits[2], strict=True)] == [False, True, True]
    assert len(set(bits[0])) == 3
    await engine.close()


async def test_keys_and_values_of_one_adapter_are_not_reused_by_another() -> None:
    engine = TransformersEngine(tiny_qwen3())
    await engine.update_weights(both(1, 2), policy_version=1)
    for name in ("left", "right", "left"):
        await ask(engine, name)
    # The third request finds what the first one left, and nothing of the second one.
    assert engine.stats.num_prefilled == 2 * (len(PROMPT) - 1)
    assert engine.stats.num_reused == len(PROMPT) - 1
    await engine.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: TensorSource(adapter(1)), r"must have the adapters of the policies \['left', 'right'\]"),
        (lambda: TensorSource([*adapter(1), ("left/x.lora_A.weight", adapter(1)[0][1])]), "a policy for each matrix"),
        (lambda: TensorSource([(f"left/{key}", each) for key, each in adapter(1)[1:]]), "came alone"),
    ],
)
async def test_an_update_that_is_not_of_its_policies_changes_nothing(source, message) -> None:
    engine = TransformersEngine(tiny_qwen3())
    await engine.update_weights(both(1, 2), policy_version=1)
    with pytest.raises(SamplingError, match=message):
        await engine.update_weights(source(), policy_version=2)
    assert engine.policy_version == 1
    await engine.close()


async def test_a_request_for_an_adapter_that_an_update_takes_away_meanwhile_is_never_sampled_by_the_model() -> None:
    engine = TransformersEngine(tiny_qwen3())
    await engine.update_weights(both(1, 2), policy_version=1)
    left = TensorSource([(f"left/{key}", each) for key, each in adapter(3)])
    engine._worker.post(lambda: time.sleep(0.2), engine._worker.new_answer())  # so that the update waits for its turn
    update = asyncio.create_task(engine.update_weights(left, policy_version=2))
    await asyncio.sleep(0.05)
    with pytest.raises(SamplingError, match=r"one of \['left'\] of this engine, got 'right'"):
        await ask(engine, "right")
    await update
    await engine.close()


async def test_adapters_of_several_policies_are_not_added_to_weights_that_have_one_merged() -> None:
    engine = TransformersEngine(tiny_qwen3())
    await engine.update_weights(TensorSource(adapter(1)), policy_version=1)
    with pytest.raises(SamplingError, match="policy version 1 is merged into the weights, to which those of several"):
        await engine.update_weights(both(2, 3), policy_version=2)
    await engine.close()


async def test_an_unknown_adapter_is_refused_by_name() -> None:
    engine = TransformersEngine(tiny_qwen3())
    await engine.update_weights(both(1, 2), policy_version=1)
    with pytest.raises(SamplingError, match=r"adapter must be one of \['left', 'right'\] of this engine, got 'other'"):
        await ask(engine, "other")
    await engine.close()
