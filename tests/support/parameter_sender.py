"""Sends weights as TRL does: an announcement, a broadcast and a barrier for each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import torch

from support.processes import free_port


class ParameterSender:
    """Does what TRL's `VLLMClient` does with a communicator; on a CPU with gloo instead of NCCL."""

    def __init__(self, base_url: str, *, device: str = "cpu") -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        from unbroken.weights.wire import make_gloo_broadcast

        on_gpu = device.startswith("cuda")
        self.http = httpx.Client(base_url=base_url, timeout=120)
        self.rank = self.http.get("/get_world_size/").json()["world_size"]
        body: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": free_port(),
            "world_size": self.rank + 1,
            "transport": "nccl" if on_gpu else "gloo",
        }
        self.post("/init_communicator/", body)
        self._group = StatelessProcessGroup.create(
            host=body["host"], port=body["port"], rank=self.rank, world_size=body["world_size"]
        )
        if on_gpu:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

            nccl = PyNcclCommunicator(self._group, device=device)
            self._broadcast = lambda tensor: nccl.broadcast(tensor, src=self.rank)
        else:
            self._broadcast = make_gloo_broadcast(self._group, source=self.rank, timeout_s=60)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the weights one after another."""
        for name, tensor in weights:
            shape = list(tensor.shape)
            self.post("/update_named_param/", {"name": name, "dtype": str(tensor.dtype), "shape": shape})
            self._broadcast(tensor.detach().contiguous())
            self._group.barrier()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def post(self, path: str, body: Any = None) -> Any:
        """Post a request that must succeed, and return the answer."""
        response = self.http.post(path, json=body or {})
        assert response.status_code == 200, response.text
        return response.json()
