"""New weights through the memory of this machine: what is opened is what was put there, and nothing stays."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.waits import wait_until
from unbroken.engines.vllm.delivery import Deliveries, Delivery, copy_to_memory, run_copy
from unbroken.engines.vllm.workers import WorkerExtension
from unbroken.errors import SamplingError, WeightsError
from unbroken.weights.checkpoint import WeightShapes
from unbroken.weights.memory import MemorySource, WeightRow
from unbroken.weights.sources import TensorSource, TensorSpec, WeightStream

CPU = torch.device("cpu")
SHAPES = WeightShapes(shapes={"embed_tokens.weight": (5, 3), "norm.weight": (3,)}, tied_to="embed_tokens.weight")
WEIGHTS = {"embed_tokens.weight": torch.randn(5, 3), "norm.weight": torch.randn(3)}


def specs_of(dtype: str) -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in SHAPES.shapes.items()]


def open_rows() -> int:
    """How many rows this process has open."""
    gc.collect()  # an error that was raised refers to what it was raised for
    links = Path("/proc/self/fd").iterdir()
    return sum("unbroken-weights" in str(link.readlink()) for link in links if link.is_symlink())


def in_memory(weights: Any, *, num_workers: int = 1) -> MemorySource:
    stream = WeightStream.of(weights.items()).cast("bfloat16")
    return copy_to_memory(stream, device_type="cpu", num_workers=num_workers)


def deliveries() -> Deliveries:
    """Those of an engine of one worker, whose model has `SHAPES`."""

    async def rpc(method: str) -> list[Any]:
        return [["bfloat16"]]

    parallel = SimpleNamespace(world_size_across_dp=1)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), parallel_config=parallel)
    made = Deliveries(SimpleNamespace(vllm_config=config), rpc, transfer_dir=None)  # type: ignore[arg-type]
    made._shapes = SHAPES
    return made


def test_what_is_opened_is_what_was_put_in_the_row_and_cast_on_the_way() -> None:
    row = WeightRow(specs_of("bfloat16"), CPU)
    for name, tensor in WEIGHTS.items():
        row.put(name, tensor)
    found = dict(row.source(1).read(CPU))
    row.close()
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in WEIGHTS.items())


def test_a_row_that_is_closed_leaves_nothing_open_and_cannot_be_opened() -> None:
    row = WeightRow(specs_of("float32"), CPU)
    source = row.source(1)
    assert open_rows() > 0
    source.close()
    source.close()
    assert open_rows() == 0
    with pytest.raises(WeightsError, match="memory that a worker cannot open"):
        source.read(CPU)


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"need 4294967296\.0 GiB more on cpu"):
        WeightRow([TensorSpec(name="w", dtype="float32", shape=(2**60,))], CPU)
    assert open_rows() == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "2 of 2 are missing"),
        ({"norm.weight": WEIGHTS["norm.weight"]}, "1 of 2 are missing, first 'embed_tokens.weight'"),
        ({**WEIGHTS, "more.weight": torch.zeros(1)}, "no weight named 'more.weight'"),
        ({**WEIGHTS, "norm.weight": torch.zeros(3, dtype=torch.int8)}, "floating-point numbers, got int8"),
    ],
)
async def test_weights_that_are_not_the_models_are_refused_and_leave_nothing_open(
    weights: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(SamplingError, match=message):
        await deliveries().prepare(TensorSource(weights.items()))
    assert open_rows() == 0


async def test_a_tied_head_is_compared_where_it_is_opened_and_not_loaded() -> None:
    for head, is_same in ((WEIGHTS["embed_tokens.weight"], True), (torch.zeros(5, 3), False)):
        delivery = await deliveries().prepare(TensorSource({**WEIGHTS, "lm_head.weight": head}.items()))
        assert delivery.names == {name: name for name in WEIGHTS}
        raised = nullcontext() if is_same else pytest.raises(WeightsError, match="tied in the model, but their values")
        with raised:
            delivery.source.read(CPU, tied=delivery.tied)
        await delivery.close()


def test_weights_that_end_early_leave_nothing_open() -> None:
    stream = WeightStream(specs_of("float32"), iter(list(WEIGHTS.items())[:1]))
    with pytest.raises(ValueError, match="shorter"):
        copy_to_memory(stream, device_type="cpu", num_workers=1)
    assert open_rows() == 0


async def test_a_copy_that_nobody_waits_for_is_closed() -> None:
    begun, go_on, copied_all = threading.Event(), threading.Event(), threading.Event()

    def slow() -> MemorySource:
        begun.set()
        go_on.wait(60)
        made = in_memory(WEIGHTS)
        copied_all.set()
        return made

    waiting = asyncio.create_task(run_copy(slow))
    await asyncio.to_thread(begun.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await asyncio.to_thread(copied_all.wait, 60)
    await wait_until(lambda: not open_rows())


async def test_a_row_that_one_worker_cannot_open_stays_open_in_none() -> None:
    workers = [Worker(rank) for rank in range(2)]

    async def rpc(method: str, *args: Any) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in workers]

    source = in_memory(WEIGHTS, num_workers=2)
    one_handle = replace(source, handles=[source.handles[0], ["host", "/nowhere"]])
    with pytest.raises(WeightsError, match="cannot open"):
        await Delivery(source=one_handle, shapes=SHAPES).receive(rpc)
    assert [worker._received for worker in workers] == [None, None]
    source.close()


class Worker(WorkerExtension):
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.device = CPU

    def _rank_of_engine(self) -> int:
        return self._rank
