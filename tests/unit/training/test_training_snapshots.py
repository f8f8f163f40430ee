"""A version of the weights is copied once for all that send it, and the copy does not change with the next step."""

from __future__ import annotations

import torch

from support.models import tiny_qwen3
from unbroken.training.config import TrainerConfig
from unbroken.training.publication import Snapshots
from unbroken.training.trainer import Trainer


async def test_a_version_is_copied_once_until_the_copy_is_released():
    model = tiny_qwen3()
    snapshots = Snapshots(Trainer(model, TrainerConfig()), is_sender=True)
    first = await snapshots.take()
    assert await snapshots.take() is first
    before = {name: tensor.clone() for name, tensor in first}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in first)
    snapshots.release()
    again = dict(await snapshots.take())
    assert all(torch.equal(before[name] + 1, tensor) for name, tensor in again.items())


async def test_a_process_that_sends_nothing_copies_nothing():
    assert await Snapshots(Trainer(tiny_qwen3(), TrainerConfig()), is_sender=False).take() is None
