"""New weights in a GPU's memory: another process opens them there, and gives the memory back."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

import pytest
import torch

from unbroken.weights.memory import MemorySource, WeightRow
from unbroken.weights.sources import TensorSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = {"embed": (1000, 1024), "norm": (3,), "head": (5, 7)}


def read(fields: dict[str, Any], rank: int, device: str = "cuda:0") -> dict[str, Any]:
    received = MemorySource.from_object(fields).read(torch.device(device), rank=rank)
    found = {}
    for name, tensor in received:
        assert tensor.device == torch.device(device)
        found[name] = tensor.float().cpu().tolist()
    del received, tensor
    torch.cuda.synchronize()
    return found


def make_row(weights: dict[str, torch.Tensor]) -> WeightRow:
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in SHAPES.items()]
    row = WeightRow(specs, torch.device("cuda", 0))
    for name, tensor in weights.items():
        row.put(name, tensor)
    return row


def make_weights() -> dict[str, torch.Tensor]:
    """Values that bfloat16 has exactly."""
    return {name: torch.randn(shape, device="cuda").bfloat16().float() for name, shape in SHAPES.items()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_worker_on_another_gpu_gets_the_weights_on_its_own() -> None:
    weights = make_weights()
    source = make_row(weights).source(2)
    with get_context("spawn").Pool(1) as pool:
        found = pool.apply(read, (source.to_object(), 1, "cuda:1"))
    source.close()
    assert found == {name: tensor.cpu().tolist() for name, tensor in weights.items()}


def test_another_process_opens_what_was_put_there_as_often_as_there_are_workers_and_it_is_given_back() -> None:
    weights = make_weights()
    before = torch.cuda.memory_allocated()
    with get_context("spawn").Pool(1) as pool:
        for _ in range(2):
            source = make_row(weights).source(2)
            for rank in range(2):
                found = pool.apply(read, (source.to_object(), rank))
                assert found == {name: tensor.cpu().tolist() for name, tensor in weights.items()}
            source.close()
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated() == before
