"""One of four processes that write and read a model's tensors in several layouts; a test starts it as a script.

Argument: the folder for checkpoints, which has `alone`, written by one process. In the end the last process dies while
all write another.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import uuid
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from unbroken.errors import CheckpointError
from unbroken.training.model.pretrained import ModelOrigin
from unbroken.training.state import TrainerState, copy_tensors, load_averages, name_averages, read_state, write_state

NUM_PROCESSES = 4


def make_model(seed: int) -> nn.Module:
    """A model some of whose sizes four processes do not divide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5), nn.LayerNorm(5), nn.Linear(5, 16))


def shard(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_PROCESSES,)))


def replicate_shards(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def shard_and_split(model: nn.Module) -> None:
    """Tensor parallelism, and FSDP2 across it: two of the tensors are cut twice along one dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shards"])


def split_packed(model: nn.Module) -> None:
    """Tensor parallelism of a projection that is two packed ones, of each of which a process holds a part."""
    mesh, packed = init_device_mesh("cpu", (NUM_PROCESSES,)), model.get_submodule("3")
    for name, parameter in list(packed.named_parameters()):
        sharded = distribute_tensor(parameter.detach(), mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
        packed.register_parameter(name, nn.Parameter(sharded))


LAYOUTS: dict[str, Callable[[nn.Module], None]] = {
    "replicated": lambda model: None,
    "sharded": shard,
    "replicated-shards": replicate_shards,
    "sharded-and-split": shard_and_split,
    "split-packed": split_packed,
}


def make_optimizer(model: nn.Module, *, num_updates: int) -> torch.optim.Optimizer:
    """The optimizer of a model, after some updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(num_updates):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (number + 1)
        optimizer.step()
    return optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    names = [name for name, _ in model.named_parameters()]
    weights = {f"weights.{name}": parameter for name, parameter in model.named_parameters()}
    return weights | {f"optimizer.{name}": tensor for name, tensor in name_averages(optimizer, names).items()}


def whole_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.detach() for name, t in tensors.items()}


def save(folder: Path, tensors: dict[str, torch.Tensor], model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint; all processes of the group do."""
    keys = [uuid.uuid4().hex]
    if group is not None:
        dist.broadcast_object_list(keys)
    trained = tuple(name for name, _ in model.named_parameters())
    origin = ModelOrigin(source="", architecture=type(model).__name__, dtype="float32", adapter=None, config={})
    state = TrainerState(policy_version=1, num_updates=2, processes=({},), frozen="", trained=trained, model=origin)
    write_state(folder, tensors=copy_tensors(tensors, group=group), state=state, key=keys[0], group=group)


def load(folder: Path, shards: Callable[[nn.Module], None]) -> dict[str, torch.Tensor]:
    """Load a checkpoint into a new model in this layout, with a new optimizer."""
    model = make_model(seed=9)
    shards(model)
    optimizer = make_optimizer(model, num_updates=0)
    stored = read_state(folder)
    stored.load("weights", dict(model.named_parameters()))
    load_averages(optimizer, [name for name, _ in model.named_parameters()], stored)
    assert optimizer.param_groups[0]["lr"] == 0.1
    return tensors_of(model, optimizer)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def train_quantised(model: nn.Module) -> torch.optim.Optimizer:
    """torchao's optimizer after some updates; `model` has a matrix of which each process's shard is quantised."""
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=0.1)
    for number in range(3):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() + number).cos()
        optimizer.step()
    return optimizer


def save_quantised(folder: Path, group: dist.ProcessGroup) -> None:
    """Write quantised averages that are sharded, and read them in the same layout."""
    models = [nn.Sequential(nn.Linear(128, 128)) for _ in range(2)]
    for model in models:
        shard(model)
    saved, loaded = (train_quantised(model) for model in models)
    tensors = tensors_of(models[0], saved)
    assert any(name.endswith(f".codes of process {dist.get_rank()} of {NUM_PROCESSES}") for name in tensors)
    save(folder, tensors, models[0], group)
    dist.barrier()
    load_averages(loaded, [name for name, _ in models[1].named_parameters()], read_state(folder))
    assert_same(whole_tensors(optimizer_of(tensors_of(models[1], loaded))), whole_tensors(optimizer_of(tensors)))


def optimizer_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The averages alone."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.")}


def die(writer: Any, plan: Any, planner: Any, *, write_data: Any) -> Any:
    """Write half, and be killed."""
    write_data(writer, type(plan)(plan.items[::2], plan.storage_data, plan.planner_data), planner)
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(writer: Any, plan: Any, planner: Any) -> Any:
    raise OSError(28, "No space left on device")


def main() -> None:
    """Write and read in all layouts, then fail to write in two ways."""
    faulthandler.dump_traceback_later(400, exit=True)
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    group, is_last = dist.new_group(backend="gloo"), dist.get_rank() == NUM_PROCESSES - 1
    model = make_model(seed=0)
    expected = tensors_of(model, make_optimizer(model, num_updates=2))
    for name, shards in LAYOUTS.items():
        model = make_model(seed=0)
        shards(model)
        tensors = tensors_of(model, make_optimizer(model, num_updates=2))
        assert_same(whole_tensors(tensors), expected)
        save(directory / name, tensors, model, group)
    dist.barrier()
    for name in (*LAYOUTS, "alone"):
        for shards in LAYOUTS.values():
            assert_same(whole_tensors(load(directory / name, shards)), expected)
    if find_spec("torchao") is not None:
        with torch.compiler.set_stance("force_eager"):
            save_quantised(directory / "quantised", group)
    write_data = FileSystemWriter.write_data
    for how, fail in (("full", refuse), ("killed", partial(die, write_data=write_data))):
        if is_last:
            FileSystemWriter.write_data = lambda *arguments, fail=fail: fail(*arguments)
        try:
            save(directory / how, tensors, model, group)
        except CheckpointError as error:
            (directory / f"{how}-{dist.get_rank()}.txt").write_text(str(error))
        FileSystemWriter.write_data = write_data
    os._exit(0)


if __name__ == "__main__":
    main()
