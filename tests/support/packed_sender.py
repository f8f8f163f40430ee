"""The trainer's side of vLLM's packed broadcast over gloo, which vLLM and TRL have only over NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from support.processes import free_port


class GlooEndpoint:
    """In place of the `PyNcclCommunicator` that vLLM's `trainer_init` returns: rank 0 of the group."""

    def __init__(self, host: str, port: int, world_size: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        from unbroken.weights.wire import make_gloo_broadcast

        self.group: Any = StatelessProcessGroup.create(host=host, port=port, rank=0, world_size=world_size)
        self._send: Any = make_gloo_broadcast(self.group, source=0, timeout_s=60)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a tensor."""
        assert src == 0
        self._send(tensor)

    def close(self) -> None:
        """Leave, as a process does that ends."""
        self.group = self._send = None


def send_packed(tensors: Iterator[tuple[str, torch.Tensor]], endpoint: GlooEndpoint, buffer_bytes: int) -> None:
    """Broadcast in vLLM's own chunks."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights larger than a buffer
        while (chunk := pack_tensors(tensors, lambda item: item[1], buffer_bytes)) is not None:
            endpoint.broadcast(chunk.packed_tensor, src=0)


class PackedSender:
    """Makes the calls that TRL makes since 1.11, one by one."""

    def __init__(self, url: str, *, port: int | None = None, **init_info: Any) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)
        own = {"timeout_s": init_info.pop("timeout_s")} if "timeout_s" in init_info else {}
        self._info = {"master_address": "127.0.0.1", "master_port": port or free_port(), "rank_offset": 1, **init_info}
        self._info.setdefault("world_size", self.http.get("/get_world_size").json()["world_size"] + 1)
        self._buffer_bytes = self._info.get("packed_buffer_size_bytes", 2**30)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/init_weight_transfer_engine", {"init_info": self._info, **own})
            self.endpoint = GlooEndpoint("127.0.0.1", self._info["master_port"], self._info["world_size"])
            answer.result()

    def start(self) -> None:
        """Begin an update."""
        self.post("/start_weight_update", {})

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], **update_info: Any) -> httpx.Response:
        """Announce and broadcast weights; returns the answer, which may be an error."""
        weights = list(weights)
        info = describe(weights) | update_info
        is_packed = update_info.get("packed", self._info.get("packed", False))
        buffer_bytes = update_info.get("packed_buffer_size_bytes", self._buffer_bytes)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.http.post, "/update_weights", json={"update_info": info})
            if is_packed:
                send_packed(iter((name, weight.detach()) for name, weight in weights), self.endpoint, buffer_bytes)
            else:
                for _, weight in weights:
                    self.endpoint.broadcast(weight.detach().contiguous(), src=0)
            return answer.result()

    def finish(self, **body: Any) -> httpx.Response:
        """End the update; returns the answer, which may be an error."""
        return self.http.post("/finish_weight_update", json=body)

    def post(self, path: str, body: Any) -> Any:
        """Post a request that must succeed, and return the answer."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def close(self) -> None:
        """Close the connections."""
        self.endpoint.close()
        self.http.close()


def describe(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the fields of `update_info`."""
    weights = list(weights)
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in weights],
        "shapes": [list(weight.shape) for _, weight in weights],
    }
