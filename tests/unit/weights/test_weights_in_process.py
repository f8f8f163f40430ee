"""Weights from a trainer's model to an engine in the same process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.models import tiny_qwen3
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import SamplingError
from unbroken.training.config import TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import token_ids
from unbroken.weights.base import InProcessPublisher, WeightPublisher

IDS = token_ids([1, 2, 3, 4, 5])


@pytest.fixture
async def engine():
    engine = TransformersEngine(tiny_qwen3(seed=0))
    yield engine
    await engine.close()


async def test_it_is_a_weight_publisher(engine):
    assert isinstance(InProcessPublisher(engine), WeightPublisher)


async def test_i6_the_engine_samples_with_what_was_published_and_says_so(engine):
    other = tiny_qwen3(seed=1)
    expected = TransformersEngine(tiny_qwen3(seed=1))
    before = (await engine.score(IDS)).logprobs
    await InProcessPublisher(engine).publish(other.named_parameters(), policy_version=7)
    assert engine.policy_version == 7
    after = (await engine.score(IDS)).logprobs
    np.testing.assert_allclose(after, (await expected.score(IDS)).logprobs, atol=1e-6)
    assert np.abs(after - before).max() > 0.1
    await expected.close()


async def test_the_engine_keeps_its_weights_when_the_trainers_change_later(engine):
    trainer = Trainer(tiny_qwen3(seed=1), TrainerConfig())
    await InProcessPublisher(engine).publish(trainer.named_weights(), policy_version=1)
    before = (await engine.score(IDS)).logprobs
    with torch.no_grad():
        for _, weight in trainer.named_weights():
            weight.zero_()
    np.testing.assert_array_equal((await engine.score(IDS)).logprobs, before)


async def test_i6_a_version_that_does_not_rise_is_refused(engine):
    publisher = InProcessPublisher(engine)
    await publisher.publish(tiny_qwen3(seed=1).named_parameters(), policy_version=1)
    with pytest.raises(SamplingError, match="policy_version"):
        await publisher.publish(tiny_qwen3(seed=0).named_parameters(), policy_version=1)


async def test_weights_of_another_model_are_refused(engine):
    with pytest.raises(SamplingError, match="shape"):
        await InProcessPublisher(engine).publish(tiny_qwen3(vocab_size=32).named_parameters(), policy_version=1)
    assert engine.policy_version == 0
