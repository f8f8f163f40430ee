"""What the trainer refuses to shard, since it would wait forever or round in silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from support.models import tiny_qwen3
from unbroken.errors import InvalidInputError
from unbroken.training.model.sharding import check_sharding, keep_float32
from unbroken.training.model.weights import checkpoint_parameters, gather_weights


def accelerator(kind: DistributedType, *, version: int = 2, parallel: Any = None, **plugin: Any) -> SimpleNamespace:
    """What `check_sharding` asks of an accelerator. A real one would need the processes and the devices."""
    sharding = FullyShardedDataParallelPlugin(fsdp_version=version, **plugin) if kind is DistributedType.FSDP else None
    return SimpleNamespace(
        distributed_type=kind,
        is_fsdp2=kind is DistributedType.FSDP and version == 2,
        parallelism_config=parallel,
        state=SimpleNamespace(fsdp_plugin=sharding),
    )


FSDP2 = accelerator(DistributedType.FSDP)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU])
def test_without_shards_nothing_is_refused(kind):
    check_sharding(accelerator(kind), tiny_qwen3(), has_images=True)


def test_a_text_model_may_be_sharded():
    check_sharding(FSDP2, tiny_qwen3(), has_images=False)


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_other_kinds_of_shards_are_refused(kind):
    with pytest.raises(InvalidInputError, match=f"must be DDP's or FSDP2's, got {kind.value}: use FSDP2"):
        check_sharding(accelerator(kind), tiny_qwen3(), has_images=False)


@pytest.mark.filterwarnings("ignore")
def test_the_first_version_of_fsdp_is_refused():
    with pytest.raises(InvalidInputError, match="fsdp_version must be 2, got 1"):
        check_sharding(accelerator(DistributedType.FSDP, version=1), tiny_qwen3(), has_images=False)


def test_parameters_that_are_kept_on_cpus_are_refused():
    with pytest.raises(InvalidInputError, match="cpu_offload must be off"):
        check_sharding(accelerator(DistributedType.FSDP, cpu_offload=True), tiny_qwen3(), has_images=False)


def test_layers_that_accelerate_checkpoints_keep_their_names():
    model = tiny_qwen3()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    names = [name for name, _ in gather_weights(model)]
    assert names == [name for name, _ in tiny_qwen3().named_parameters()] == list(checkpoint_parameters(model))


def test_processes_that_would_train_on_the_same_rows_are_refused():
    parallel = ParallelismConfig(dp_shard_size=2, tp_size=2)
    with pytest.raises(InvalidInputError, match="must have data parallelism only"):
        check_sharding(accelerator(DistributedType.FSDP, parallel=parallel), tiny_qwen3(), has_images=False)
    both_of_data = ParallelismConfig(dp_shard_size=2, dp_replicate_size=2)
    check_sharding(accelerator(DistributedType.FSDP, parallel=both_of_data), tiny_qwen3(), has_images=False)


def test_a_vision_tower_that_trains_without_images_is_refused():
    model = tiny_qwen3()
    model.tower = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidInputError, match="takes images, and FSDP2 would wait forever for gradients"):
        check_sharding(FSDP2, model, has_images=False)
    check_sharding(FSDP2, model, has_images=True)
    model.tower.requires_grad_(False)
    check_sharding(FSDP2, model, has_images=False)


def test_the_mixed_precision_that_accelerate_makes_of_bf16_is_refused():
    """It adds gradients and returns logprobs in bfloat16."""
    of_accelerate = accelerator(DistributedType.FSDP)
    of_accelerate.state.fsdp_plugin.set_mixed_precision("bf16")
    with pytest.raises(
        InvalidInputError, match=r"float32, got reduce_dtype=torch\.bfloat16 .* and output_dtype=torch\.bf"
    ):
        check_sharding(of_accelerate, tiny_qwen3(), has_images=False)
    keep_float32(of_accelerate)
    check_sharding(of_accelerate, tiny_qwen3(), has_images=False)
    kept = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert of_accelerate.state.fsdp_plugin.mixed_precision_policy == kept


def test_a_precision_that_adds_gradients_in_that_of_the_layers_is_refused():
    """FSDP2 does so by default."""
    rounding = accelerator(DistributedType.FSDP, mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16))
    with pytest.raises(InvalidInputError, match=r"got reduce_dtype=None \(None is param_dtype, torch\.bfloat16\)"):
        check_sharding(rounding, tiny_qwen3(), has_images=False)
    check_sharding(
        accelerator(DistributedType.FSDP, mixed_precision_policy=MixedPrecisionPolicy()), tiny_qwen3(), has_images=False
    )


def test_an_accelerator_without_shards_has_no_precision_to_keep():
    keep_float32(accelerator(DistributedType.NO))
    keep_float32(FSDP2)
    assert FSDP2.state.fsdp_plugin.mixed_precision_policy is None
