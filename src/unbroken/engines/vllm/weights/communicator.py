"""TRL's communicator, in a worker: one broadcast and one barrier for each parameter, from the last rank.

It uses vLLM's `StatelessProcessGroup` and `PyNcclCommunicator`, as TRL's `VLLMClient` does (TRL's PRs #5225, #5227,
#5228). TRL has no gloo; here it serves machines without GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unbroken.transfer.announcement import Transport
from unbroken.transfer.layout import TensorSpec

if TYPE_CHECKING:
    import torch

_JOIN_TIMEOUT_S = 60
_BROADCAST_TIMEOUT_S = 60


class Communicator:
    """One worker's membership in the group; the sender has the last rank."""

    def __init__(
        self, *, host: str, port: int, rank: int, world_size: int, device: torch.device, transport: Transport
    ) -> None:
        """Join the group; `RuntimeError` if another member does not join within a minute."""
        from vllm.distributed.utils import StatelessProcessGroup

        self._group = StatelessProcessGroup.create(
            host=host, port=port, rank=rank, world_size=world_size, store_timeout=_JOIN_TIMEOUT_S
        )
        self._device = device
        self._source = world_size - 1
        self._broadcast = self._make_nccl() if transport is Transport.NCCL else self._make_gloo()

    def receive(self, spec: TensorSpec) -> torch.Tensor:
        """Receive the next parameter; `RuntimeError` if the sender or another worker is gone."""
        import torch

        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        self._broadcast(tensor)
        self._group.barrier()
        return tensor

    def _make_nccl(self) -> Callable[[torch.Tensor], None]:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        communicator = PyNcclCommunicator(self._group, device=self._device)
        return lambda tensor: communicator.broadcast(tensor, src=self._source)

    def _make_gloo(self) -> Callable[[torch.Tensor], None]:
        return make_gloo_broadcast(self._group, source=self._source)


def make_gloo_broadcast(
    group: Any, *, source: int, timeout_s: float = _BROADCAST_TIMEOUT_S
) -> Callable[[torch.Tensor], None]:
    """Return a function that broadcasts a tensor in a `StatelessProcessGroup` from the rank `source`."""
    from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    store = PrefixStore("gloo", group.store)
    gloo: Any = ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=timeout_s))
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0

    def broadcast(tensor: torch.Tensor) -> None:
        gloo.broadcast([tensor], options).wait()

    return broadcast
