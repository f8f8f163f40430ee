"""The copy of the weights that is published beside the next step does not change with that step."""

from __future__ import annotations

import torch

from support.models import tiny_qwen3
from unbroken.training.config import TrainerConfig
from unbroken.training.publication import copy_weights
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate


class Publisher:
    async def publish(self, named_parameters, *, policy_version):
        return WeightUpdate(num_bytes=0, seconds=0.0)


async def test_a_copy_stays_as_it_is_when_the_weights_change():
    model = tiny_qwen3()
    trainer = Trainer(model, TrainerConfig())
    copy = dict(await copy_weights(trainer, Publisher()))
    before = {name: tensor.clone() for name, tensor in copy.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in copy.items())
    again = dict(await copy_weights(trainer, Publisher()))
    assert all(torch.equal(before[name] + 1, tensor) for name, tensor in again.items())


async def test_a_process_that_publishes_nothing_copies_nothing():
    assert await copy_weights(Trainer(tiny_qwen3(), TrainerConfig()), None) is None
