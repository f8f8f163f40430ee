"""What the trainer refuses beside shards, since it would wait forever or be wrong in silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import DistributedType, ParallelismConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from support.adapted import with_lora
from support.models import tiny_qwen3
from support.vision import save_vision_model
from support.vision_engines import load_vision_model
from unbroken.errors import InvalidInputError
from unbroken.training.config import LoraUpdates, ParallelConfig, TrainerConfig
from unbroken.training.loss_config import ReferenceSync
from unbroken.training.model import sharding
from unbroken.training.model.sharding import check_sharding, make_distributed_config
from unbroken.training.model.weights import checkpoint_parameters, gather_weights


def accelerator(
    kind: DistributedType = DistributedType.MULTI_CPU, *, num_processes: int = 2, parallel: Any = None
) -> SimpleNamespace:
    """What `check_sharding` asks of an accelerator. A real one would need the processes and the devices."""
    return SimpleNamespace(distributed_type=kind, num_processes=num_processes, parallelism_config=parallel)


def check(parallel: ParallelConfig, *, model: Any = None, **config: Any) -> None:
    """Check a model that is taken for sharded."""
    check_sharding(
        accelerator(num_processes=parallel.num_processes),
        model or tiny_qwen3(),
        TrainerConfig(parallel=parallel, **config),
    )


@pytest.fixture
def split(monkeypatch):
    monkeypatch.setattr(sharding, "is_split", lambda model: True)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU])
def test_without_shards_nothing_is_refused(kind):
    check_sharding(accelerator(kind), tiny_qwen3(), TrainerConfig())


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP])
def test_shards_of_accelerate_are_refused(kind):
    with pytest.raises(InvalidInputError, match=f"must be DDP's, got {kind.value}: set trainer.parallel.fsdp to"):
        check_sharding(accelerator(kind), tiny_qwen3(), TrainerConfig())


def test_parallelism_of_accelerate_is_refused():
    parallel = ParallelismConfig(dp_shard_size=2)
    with pytest.raises(InvalidInputError, match=r"parallelism_config must be left out, got .* set trainer\.parallel"):
        check_sharding(accelerator(parallel=parallel), tiny_qwen3(), TrainerConfig())


def test_a_whole_model_is_refused_where_processes_should_share_it():
    with pytest.raises(InvalidInputError, match=r"must be loaded for trainer\.parallel, got Par"):
        check(ParallelConfig(fsdp=2))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 0}, "fsdp must be >= 1, got 0"),
        ({"replicate": 2}, "replicate must be 1 with fsdp 1"),
        ({"expert": 3, "fsdp": 2}, r"expert must be a divisor of fsdp \* tensor, 2, got 3"),
        ({"expert": 2, "fsdp": 2, "tensor": 4}, "expert must be >= 1, and above 1 a multiple of tensor, 4, got 2"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, message):
    with pytest.raises(InvalidInputError, match=message):
        ParallelConfig(**sizes)


def test_another_number_of_processes_is_refused():
    with pytest.raises(InvalidInputError, match=r"replicate 2 \* fsdp 2 \* tensor 1 = 4 processes, and there are 2"):
        ParallelConfig(fsdp=2, replicate=2).check_processes(2)
    ParallelConfig().check_processes(3)


def test_what_needs_a_newer_transformers_is_refused_with_its_version(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.19.0")
    for name, parallel in (
        ("replicate", ParallelConfig(fsdp=2, replicate=2)),
        ("expert", ParallelConfig(fsdp=2, expert=2)),
    ):
        with pytest.raises(InvalidInputError, match=f"parallel.{name} = 2 needs transformers 5.23, and 5.19.0 is"):
            make_distributed_config(parallel, is_bfloat16=False)


def test_settings_that_do_not_go_with_shards_are_refused_with_both_names(split):
    fsdp, tensor, expert = ParallelConfig(fsdp=2), ParallelConfig(tensor=2), ParallelConfig(fsdp=2, expert=2)
    check(fsdp, model=with_lora(tiny_qwen3(), use_rslora=True), lora_updates=LoraUpdates.MERGED)
    check(fsdp, compile=True)
    for parallel, name, changes in (
        (fsdp, "a LoRA with DoRA must be left out with trainer.parallel.fsdp",
         {"model": with_lora(tiny_qwen3(), use_dora=True)}),
        (tensor, "LoRA must be left out with trainer.parallel.tensor", {"model": with_lora(tiny_qwen3())}),
        (tensor, "trainer.compile must be left out with trainer.parallel.tensor", {"compile": True}),
        (expert, "trainer.router_loss_weight must be left out with trainer.parallel.expert",
         {"router_loss_weight": 1.0}),
        (expert, "trainer.reference_sync must be left out with trainer.parallel.expert",
         {"reference_sync": ReferenceSync(every=2, mixup=0.5)}),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=name):
            check(parallel, **changes)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("tensor", ParallelConfig(tensor=2)),
        ("expert", ParallelConfig(fsdp=2, expert=2)),
        ("sequence", ParallelConfig(fsdp=2, sequence=2)),
    ],
)
def test_a_vision_tower_goes_with_fsdp_and_replicas_alone(split, tmp_path, name, parallel):
    model = load_vision_model(save_vision_model(tmp_path))
    check(ParallelConfig(fsdp=2), model=model)
    check(ParallelConfig(fsdp=2, replicate=2), model=model)
    with pytest.raises(InvalidInputError, match=rf"a vision tower must be left out with trainer\.parallel\.{name}"):
        check(parallel, model=model)


def test_a_vision_tower_with_shards_of_its_own_is_refused(split, tmp_path, monkeypatch):
    """A process whose rows have no image would not gather them."""
    model = load_vision_model(save_vision_model(tmp_path))
    monkeypatch.setattr(sharding, "FSDPModule", type(model.model.visual.blocks[0]))
    with pytest.raises(
        InvalidInputError, match=r"with shards of its own must be left out with trainer\.parallel\.fsdp"
    ):
        check(ParallelConfig(fsdp=2), model=model)


def test_layers_that_accelerate_checkpoints_keep_their_names():
    model = tiny_qwen3()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    names = [name for name, _ in gather_weights(model)]
    assert names == [name for name, _ in tiny_qwen3().named_parameters()] == list(checkpoint_parameters(model))


def test_gradients_of_parameters_on_one_mesh_are_clipped_as_torch_does():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
    for parameter in parameters:
        parameter.grad = 2 * torch.ones_like(parameter)
    assert sharding.clip_gradients(parameters, 1.0) == pytest.approx(12**0.5)
    assert sum(float((each.grad**2).sum()) for each in parameters if each.grad is not None) == pytest.approx(1.0)
