"""Adapters alone, instead of merged weights: by every transport, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.adapted import with_lora
from support.models import tiny_qwen3
from support.publishing import mismatch
from support.servers import listening, make_app, server_tokenizer
from support.waits import wait_until
from unbroken.client import AsyncClient
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError, SamplingError
from unbroken.training.config import LoraUpdates, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher, WeightPublisher
from unbroken.weights.broadcast import BroadcastPublisher
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.sources import TensorSource

ADAPTER = TrainerConfig(lora_updates=LoraUpdates.ADAPTER)
Q = "model.layers.0.self_attn.q_proj"


def base() -> Any:
    return tiny_qwen3(vocab_size=len(server_tokenizer()))


def trainer(config: TrainerConfig = ADAPTER, **lora: Any) -> Trainer:
    return Trainer(with_lora(base(), **lora), config)


def change(trained: Trainer, seed: int) -> None:
    """Give the adapter other values, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained.backend.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@asynccontextmanager
async def publishing(kind: str, folder: Path) -> AsyncIterator[tuple[TransformersEngine, WeightPublisher]]:
    """An engine of the base, and a publisher to it."""
    engine = TransformersEngine(base())
    if kind == "in process":
        yield engine, InProcessPublisher(engine)
    else:
        async with listening(make_app(engine, weights_dir=folder)) as url, AsyncClient(url, max_retries=0) as client:
            if kind == "files":
                yield engine, DiskPublisher([client], folder)
            else:
                publisher = BroadcastPublisher([client], bucket_bytes=4096, timeout_s=10.0)
                yield engine, publisher
                publisher.close()
    await engine.close()


@pytest.mark.parametrize("kind", ["in process", "files", "broadcast"])
async def test_after_each_update_the_engines_logprobs_are_the_trainers(kind: str, tmp_path: Path) -> None:
    trained = trainer(r=4, lora_alpha=6, rank_pattern={"o_proj": 2}, alpha_pattern={"v_proj": 5}, use_rslora=True)
    async with publishing(kind, tmp_path) as (engine, publisher):
        assert await mismatch(trained, engine) > 0.1
        for version in (1, 2, 3):
            change(trained, version)
            update = await publisher.publish(trained.named_weights(), policy_version=version)
            assert engine.policy_version == version
            assert await mismatch(trained, engine) < 1e-5
    merged = sum(tensor.nbytes for _, tensor in trainer(TrainerConfig()).named_weights())
    assert 0 < update.num_bytes < merged / 2


async def test_an_adapter_is_added_to_the_first_weights_not_to_the_adapter_before() -> None:
    engine, expected = TransformersEngine(base()), TransformersEngine(base())
    wide, narrow = trainer(), trainer(target_modules=["q_proj"])
    publisher = InProcessPublisher(engine)
    await publisher.publish(wide.named_weights(), policy_version=1)
    await publisher.publish(narrow.named_weights(), policy_version=2)
    await InProcessPublisher(expected).publish(narrow.named_weights(), policy_version=2)
    ids = token_ids([1, 2, 3, 4, 5])
    np.testing.assert_array_equal((await engine.score(ids)).logprobs, (await expected.score(ids)).logprobs)
    for one in (engine, expected):
        await one.close()


async def test_i6_a_request_in_flight_of_an_engine_that_merges_has_both_versions() -> None:
    engine, trained = TransformersEngine(base()), trainer()
    request = SampleRequest(request_id="a", prompt_ids=token_ids([1, 2, 3]), params=SamplingParams(max_tokens=400))
    running = asyncio.create_task(engine.sample(request))
    await wait_until(lambda: engine.stats.num_sampled >= 3)
    await InProcessPublisher(engine).publish(trained.named_weights(), policy_version=5)
    (sequence,) = (await running).sequences
    assert [span.policy_version for span in sequence.version_spans] == [0, 5]
    await engine.close()


def matrices(*names: str, rank: int = 2, rows: int = 32, columns: int = 32) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros((rank, columns) if name.endswith("lora_A.weight") else (rows, rank))) for name in names]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (matrices(f"{Q}.lora_A.weight"), r"'.*q_proj\.lora_B\.weight' is missing: .*lora_A.* came alone"),
        (matrices("x.lora_A.weight", "x.lora_B.weight"), r"module 'x', and the model has no weight named 'x\.weight'"),
        (
            matrices(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", rows=31),
            r"shape \(32, 32\), got \(2, 32\) and \(31, 2\)",
        ),
        (
            [*matrices(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"), ("model.norm.weight", torch.zeros(32))],
            r"whole weights or an adapter, got both: 'model\.norm\.weight' is a weight",
        ),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(tensors: Any, message: str) -> None:
    engine = TransformersEngine(base())
    ids = token_ids([1, 2, 3])
    before = (await engine.score(ids)).logprobs
    with pytest.raises(SamplingError, match=message):
        await engine.update_weights(TensorSource(tensors), policy_version=1)
    np.testing.assert_array_equal((await engine.score(ids)).logprobs, before)
    await engine.close()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (LoraUpdates.MERGED, LoraUpdates.ADAPTER, "whole weights of policy version 1 have replaced"),
        (LoraUpdates.ADAPTER, LoraUpdates.MERGED, "the adapter of policy version 1, and whole weights came"),
    ],
)
async def test_adapters_and_whole_weights_do_not_follow_each_other(
    first: LoraUpdates, second: LoraUpdates, message: str
) -> None:
    engine = TransformersEngine(base())
    publisher = InProcessPublisher(engine)
    await publisher.publish(trainer(TrainerConfig(lora_updates=first)).named_weights(), policy_version=1)
    with pytest.raises(SamplingError, match=message):
        await publisher.publish(trainer(TrainerConfig(lora_updates=second)).named_weights(), policy_version=2)
    await engine.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (base, "model must be a peft.PeftModel with lora_updates adapter, got a Qwen3ForCausalLM"),
        (lambda: with_lora(base(), use_dora=True), "LoraConfig.use_dora False .* got True"),
        (lambda: with_lora(base(), init_lora_weights="pissa"), "init_lora_weights 'pissa' changes its weights"),
        (lambda: with_lora(base(), bias="lora_only"), "LoraConfig.bias 'none' .* got 'lora_only'"),
        (lambda: with_lora(base(), modules_to_save=["norm"]), r"norm.* must not be trained with lora_updates adapter"),
    ],
)
def test_a_model_whose_adapter_is_not_all_that_is_trained_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Trainer(make(), ADAPTER)
