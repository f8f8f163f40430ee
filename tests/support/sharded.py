"""FSDP2 between processes on the CPU, which accelerate supports only on accelerators."""

from __future__ import annotations

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def fsdp2_on_cpu(**plugin: object) -> Accelerator:
    """Make an accelerator that shards by transformer block. All later accelerators of this process do the same.

    On a CPU accelerate ignores the plugin and uses DDP, so this sets what it would set for a GPU.
    """
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True, **plugin
    )
    return accelerator
