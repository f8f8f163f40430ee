"""A worker's membership in the group of a trainer that sends by vLLM's packed broadcast.

The group is vLLM's own (`StatelessProcessGroup`, `PyNcclCommunicator`), because its wire is; on a CPU, where vLLM has
no transfer, it is gloo over the same store. The store belongs to the trainer, so it shows whether the trainer lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unbroken.engines.vllm.weights.communicator import make_gloo_broadcast
from unbroken.errors import WeightsError
from unbroken.transfer.announcement import Transport
from unbroken.transfer.group import wait_for_stream, weights_errors
from unbroken.transfer.packed import Rendezvous

if TYPE_CHECKING:
    import torch


class PackedGroup:
    """One worker's membership."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int, device: torch.device) -> None:
        """Join; `WeightsError` if the trainer or another worker does not join in time."""
        from vllm.distributed.utils import StatelessProcessGroup

        self._rendezvous = rendezvous
        self._device = device
        self._nccl: Any = None
        with weights_errors(
            f"the group of {rendezvous.world_size} did not meet at {rendezvous.host}:{rendezvous.port} within "
            f"{rendezvous.join_timeout_s:g} s"
        ):
            self._group = StatelessProcessGroup.create(
                host=rendezvous.host, port=rendezvous.port, rank=rendezvous.first_rank + rank,
                world_size=rendezvous.world_size, store_timeout=max(1, round(rendezvous.join_timeout_s)),
            )  # fmt: skip
            self._fill = self._connect_nccl() if rendezvous.transport is Transport.NCCL else self._connect_gloo()

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Receive the next chunk as bytes [num_bytes], on the worker's device.

        Raises:
            WeightsError: the trainer is gone or sends nothing in time, or there is no room. The group is useless then.
        """
        import torch

        try:
            chunk = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise WeightsError(f"a chunk of {num_bytes / 2**30:.2f} GiB has no room on {self._device}") from error
        if num_bytes:
            self._fill(chunk)
        return chunk

    def close(self) -> None:
        """Leave the group, even during a broadcast."""
        if self._nccl is not None:
            self._nccl.destroy()  # aborts: a broadcast whose sender is gone would stay on the GPU forever
        self._nccl = self._group = None
        self._fill = _refuse

    def _connect_nccl(self) -> Callable[[torch.Tensor], None]:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.utils.nccl import unpinned_nccl_env

        with unpinned_nccl_env():  # as the trainer's side does
            self._nccl = nccl = PyNcclCommunicator(self._group, device=self._device)
        if nccl.disabled:
            raise WeightsError("vLLM has no NCCL here (VLLM_DISABLE_PYNCCL, or its library is missing)")
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

        def fill(chunk: torch.Tensor) -> None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            nccl.broadcast(chunk, src=0, stream=stream)
            wait_for_stream(stream, timeout_s=self._rendezvous.timeout_s, check=self._check_trainer)

        return fill

    def _connect_gloo(self) -> Callable[[torch.Tensor], None]:
        broadcast = make_gloo_broadcast(self._group, source=0, timeout_s=self._rendezvous.timeout_s)

        def fill(chunk: torch.Tensor) -> None:
            with weights_errors("the trainer is gone, or sent nothing in time"):
                broadcast(chunk)

        return fill

    def _check_trainer(self) -> None:
        assert self._group is not None
        with weights_errors("the trainer is gone"):
            self._group.store.check(["alive"])


def _refuse(chunk: torch.Tensor) -> None:
    raise WeightsError("the group was left")
