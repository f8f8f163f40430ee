"""vLLM's own weight transfer over gloo, for a stock `vllm serve` on a CPU: its NCCL engine with another communicator.

Named as the server's worker extension, this module adds the backend `gloo` to vLLM's registry. All else is vLLM's: the
routes, the workers' states, the layerwise reload.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from unbroken.weights.wire import make_gloo_broadcast


class Extension:
    """A worker extension without methods."""


class GlooTransferEngine(NCCLWeightTransferEngine):
    """Receives as `packed_nccl_broadcast_consumer` does, and loads each chunk as it comes."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        assert init_info.packed
        group = StatelessProcessGroup.create(
            host=init_info.master_address,
            port=init_info.master_port,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
        )
        self._broadcast = make_gloo_broadcast(group, source=0, timeout_s=60)
        self._group = group

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        chunk: list[tuple[str, list[int], torch.dtype, int]] = []
        for name, dtype_name, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            chunk.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
            if sum(size for *_, size in chunk) > self.packed_buffer_size_bytes:
                self._load(chunk)
                chunk = []
        if chunk:
            self._load(chunk)

    def _load(self, chunk: list[tuple[str, list[int], torch.dtype, int]]) -> None:
        names, shapes, dtypes, sizes = (list(column) for column in zip(*chunk, strict=True))
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        self._broadcast(packed)
        self.model.load_weights(unpack_tensor(packed, names, shapes, dtypes, sizes))


WeightTransferEngineFactory.register_engine("gloo", GlooTransferEngine)
