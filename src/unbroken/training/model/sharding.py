"""FSDP2: parameters of which each process holds a part (`DTensor`), and operations that all processes make together.

    embed_tokens.weight [64, 32]    process 0 holds rows 0..31, process 1 rows 32..63    `gather_tensor`: [64, 32]

All processes gather together, and wait forever for one that does not take part. So each gathers the same tensors in
the same order, even if it fails meanwhile (`gather_rest`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from unbroken.errors import InvalidInputError, TrainingError
from unbroken.training.model.backbone import parameters_beside_text
from unbroken.training.model.logprobs import PolicyLogprobs

T = TypeVar("T")
_CPU = torch.device("cpu")
_FLOAT32 = {None, torch.float32}


def check_sharding(accelerator: Accelerator, model: Any, *, has_images: bool) -> None:
    """Check that parameters are not sharded, or sharded by FSDP2 in a way that is exact.

    Raises:
        InvalidInputError: DeepSpeed, Megatron, FSDP1, tensor or context parallelism, mixed precision that rounds
            gradients or logprobs, CPU offload, or an image-text model that trains its vision tower without images.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise InvalidInputError(f"accelerator.distributed_type must be DDP's or FSDP2's, got {kind.value}: use FSDP2")
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.total_size != parallel.data_parallel_size:
        raise InvalidInputError(
            "accelerator.parallelism_config must have data parallelism only, because with tensor, context or sequence "
            f"parallelism several processes would train on the same rows, got {parallel}. Context parallelism would "
            "also cut rows between an id and its logprob, and its attention takes neither masks nor borders of rows: "
            "for long rows set TrainerConfig.gradient_checkpointing (128k tokens of a 0.6B model took 31 GiB)"
        )
    if kind is not DistributedType.FSDP:
        return
    if not accelerator.is_fsdp2:
        raise InvalidInputError("accelerator.fsdp_plugin.fsdp_version must be 2, got 1")
    plugin = accelerator.state.fsdp_plugin
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise InvalidInputError("accelerator.fsdp_plugin.cpu_offload must be off: gathering from CPUs is untested")
    policy = plugin.mixed_precision_policy
    if policy is not None and not {policy.reduce_dtype or policy.param_dtype, policy.output_dtype} <= _FLOAT32:
        raise InvalidInputError(
            "accelerator.fsdp_plugin.mixed_precision_policy must add gradients and return logprobs in float32, got "
            f"reduce_dtype={policy.reduce_dtype} (None is param_dtype, {policy.param_dtype}) and "
            f"output_dtype={policy.output_dtype}. accelerate chooses so for mixed_precision='bf16': call "
            "unbroken.training.model.sharding.keep_float32(accelerator) first"
        )
    if not has_images and parameters_beside_text(model):
        raise InvalidInputError(
            f"{type(model).__name__} takes images, and FSDP2 would wait forever for gradients of its vision tower "
            "without `images`: give the trainer their processor, or freeze the tower (requires_grad_(False))"
        )


def keep_float32(accelerator: Accelerator) -> None:
    """With FSDP2 and mixed precision, add gradients and return logprobs in float32, as `check_sharding` requires."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        policy = plugin.mixed_precision_policy
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether all processes make each forward pass together."""
    return bool(accelerator.is_fsdp2)


def shard_frozen(accelerator: Accelerator, policy: PolicyLogprobs) -> None:
    """Move a policy that is not trained to the accelerator's device, sharded if the trained one is."""
    if not is_sharded(accelerator):
        policy.to(accelerator.device)
        return
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    fsdp2_prepare_model(accelerator, policy)


def _make_group(size: int) -> torch.distributed.ProcessGroup:
    """The group of `size` processes, with numbers in sequence, that has this one. All processes call it."""
    make: Any = torch.distributed.new_subgroups
    own: torch.distributed.ProcessGroup = make(group_size=size)[0]
    return own


class SameRows:
    """The processes that compute the same rows, with a part of each matrix, or a part of the ids: each has rows of its
    own, and all of them compute those of all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._group = _make_group(size) if size > 1 else None
        self._index = torch.distributed.get_rank() % size if size > 1 else 0

    @property
    def is_alone(self) -> bool:
        """Whether no other process computes the rows of this one."""
        return self._size == 1

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """These processes, if there are several."""
        assert self._group is not None, "a process that is alone has no group"
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this process counts what all of them compute."""
        return self._index == 0

    def share(self, mine: Sequence[T]) -> tuple[list[T], range]:
        """The values of all of these processes, and which of them are those of this one."""
        everyone: list[Any] = [None] * self._size
        torch.distributed.all_gather_object(everyone, list(mine), group=self._group)
        before = sum(len(values) for values in everyone[: self._index])
        return list(chain(*everyone)), range(before, before + len(mine))


def reshard(module: torch.nn.Module) -> None:
    """Free gathered parameters: after a pass without backward, the outermost ones are still gathered, as copies."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all processes if it is sharded; else the tensor itself, detached."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    with on_device(tensor.device):
        return tensor.full_tensor()


def shard_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole `tensor` that this process has of `target`. Nothing is communicated."""
    if not isinstance(target, DTensor):
        return tensor
    whole = tensor.to(target.device)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current device of this thread, which NCCL and FSDP use; in a new thread it is the first GPU."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def gather_rest(*tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gather the remaining tensors, for which the other processes wait."""
    deque(chain(*tensors), maxlen=0)


def raise_together(error: Exception | None) -> None:
    """Raise on every process if one has an error: there the error itself, elsewhere a `TrainingError` with its text."""
    errors = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, message in enumerate(errors):
        if message is not None:
            raise TrainingError(f"process {process} failed: {message}")


@contextmanager
def fail_together(device: torch.device = _CPU) -> Iterator[None]:
    """Run the block in every process; if it fails in one, raise on all, as `raise_together` does.

    For what may fail in one process only, such as writing a file: the others would wait for it forever. Nothing in the
    block may wait for other processes. `device` is that of the process, needed in threads.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    with on_device(device):
        raise_together(failure)
