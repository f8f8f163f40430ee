"""FSDP2 between processes on the CPU, which accelerate itself offers on accelerators only."""

from __future__ import annotations

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def fsdp2_on_cpu(**plugin: object) -> Accelerator:
    """An accelerator that shards by transformer block. All accelerators made later in this process are the same.

    On a CPU accelerate ignores the plugin and takes DDP, so what it would set for a GPU is set here.
    """
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True, **plugin
    )
    return accelerator
