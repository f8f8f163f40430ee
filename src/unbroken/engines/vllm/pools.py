"""A patch of the memory pools of vLLM 0.32 and 0.33: memory that sleeps is mapped before it is freed.

vLLM unmaps sleeping memory, and its C code unmaps whatever is freed. An engine that is shut down in its sleep, because
the run was ended during a step, so printed "CUDA Error: invalid argument at .../cumem_allocator.cpp" for each
allocation. vLLM leaves such memory out on ROCm only (`CuMemAllocator._python_free_callback`). Mapping one allocation at
a time needs no more memory than the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class MappedOnFree(dict[int, Any]):
    """vLLM's table of allocations by address, from which its free callback takes those that are to be unmapped."""

    def __init__(self, allocations: Mapping[int, Any], map_memory: Callable[[Any], None]) -> None:
        super().__init__(allocations)
        self._map_memory = map_memory

    def pop(self, address: int) -> Any:  # type: ignore[override]  # vLLM gives no default
        """Remove an allocation and return it, mapped."""
        allocation = super().pop(address)
        if allocation.is_asleep:
            self._map_memory(allocation.handle)
            allocation.is_asleep = False
        return allocation


def map_on_free() -> None:
    """Apply the patch in a worker, if it has such pools."""
    from vllm.device_allocator import cumem
    from vllm.platforms import current_platform

    allocator = cumem.CuMemAllocator.instance
    if allocator is not None and current_platform.is_cuda():
        allocator.pointer_to_data = MappedOnFree(allocator.pointer_to_data, cumem.create_and_map)
