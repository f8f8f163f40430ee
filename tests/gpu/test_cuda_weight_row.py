"""New weights in a GPU's memory: another process opens them there, and gives the memory back."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

import pytest
import torch

from support.installed import require_vllm

require_vllm()

from unbroken.transfer.layout import ALIGNMENT, Layout, TensorSpec  # noqa: E402
from unbroken.transfer.memory import WeightRow, opened  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = {"embed": (1000, 1024), "norm": (3,), "head": (5, 7)}


def read(handle: list[Any], layout: Layout) -> dict[str, Any]:
    found = {name: tensor.float().cpu().tolist() for name, tensor in opened(handle, layout)}
    torch.cuda.synchronize()
    return found


def test_another_process_opens_what_was_put_there_as_often_as_there_are_workers_and_it_is_given_back() -> None:
    layout = Layout(
        specs=tuple(TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in SHAPES.items()),
        bucket_bytes=ALIGNMENT,
    )
    weights = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
    before = torch.cuda.memory_allocated()
    with get_context("spawn").Pool(1) as pool:
        for _ in range(2):
            row = WeightRow(layout, torch.device("cuda", 0))
            for name, tensor in weights.items():
                row.put(name, tensor)
            for handle in [row.handle(), row.handle()]:
                found = pool.apply(read, (handle, layout))
                assert found == {name: tensor.bfloat16().float().cpu().tolist() for name, tensor in weights.items()}
            row.close()
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated() == before
