"""TRL's own client and trainer on a CPU: their NCCL is replaced by gloo, and nothing else of them.

TRL's `init_communicator` refuses devices other than GPUs, and calls vLLM's `trainer_init` and
`packed_nccl_broadcast_producer`, which need NCCL and streams of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from support.packed_sender import GlooEndpoint, send_packed


def replace_nccl_in_trl() -> None:
    """Make the installed TRL (1.11 or later) send weights over gloo, in this process."""
    from trl.generation import vllm_client

    assert vllm_client._HAS_STATEFUL_TRAINER_ENGINE
    init_communicator = vllm_client.VLLMClient.init_communicator

    def open_endpoint(init_info: dict[str, Any]) -> GlooEndpoint:
        return GlooEndpoint(init_info["master_address"], init_info["master_port"], init_info["world_size"])

    def produce(iterator: Iterator[Any], group: GlooEndpoint, src: int, post_iter_func: Callable[[Any], Any]) -> None:
        send_packed(((name, weight.detach().cpu()) for name, weight in iterator), group, 2**30)

    vllm_client.open_trainer_endpoint = open_endpoint
    vllm_client.packed_nccl_broadcast_producer = produce
    # A device without an index is not touched: on a CPU it only passes the check.
    vllm_client.VLLMClient.init_communicator = lambda self, device: init_communicator(self, device="cuda")
