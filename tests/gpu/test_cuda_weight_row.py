"""New weights in a GPU's memory: another process opens them there, and gives the memory back."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

import pytest
import torch

from unbroken.transfer.layout import TensorSpec
from unbroken.transfer.memory import MemoryReceiver, MemorySource, WeightRow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = {"embed": (1000, 1024), "norm": (3,), "head": (5, 7)}


def read(fields: dict[str, Any], rank: int) -> dict[str, Any]:
    received = MemoryReceiver("cuda", rank=rank).receive(MemorySource.from_object(fields))
    found = {name: tensor.float().cpu().tolist() for name, tensor in received.tensors}
    del received
    torch.cuda.synchronize()
    return found


def test_another_process_opens_what_was_put_there_as_often_as_there_are_workers_and_it_is_given_back() -> None:
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in SHAPES.items()]
    weights = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
    before = torch.cuda.memory_allocated()
    with get_context("spawn").Pool(1) as pool:
        for _ in range(2):
            row = WeightRow(specs, torch.device("cuda", 0))
            for name, tensor in weights.items():
                row.put(name, tensor)
            source = row.source(2)
            for rank in range(2):
                found = pool.apply(read, (source.to_object(), rank))
                assert found == {name: tensor.bfloat16().float().cpu().tolist() for name, tensor in weights.items()}
            source.close()
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated() == before
