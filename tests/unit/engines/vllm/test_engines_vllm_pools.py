"""Sleeping memory is mapped once before vLLM frees it, and vLLM still needs that."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM, while it is imported


def test_memory_is_mapped_before_it_is_freed_only_if_it_sleeps():
    from unbroken.engines.vllm.patches import MappedOnFree

    mapped = []
    asleep, awake = (SimpleNamespace(handle=name, is_asleep=name == "asleep") for name in ("asleep", "awake"))
    allocations = MappedOnFree({1: asleep, 2: awake}, mapped.append)
    assert [allocations.pop(1), allocations.pop(2)] == [asleep, awake]
    assert mapped == ["asleep"]
    assert not asleep.is_asleep
    assert not allocations


def test_vllm_still_frees_sleeping_memory_as_if_it_were_mapped():
    """Once this fails, `map_on_free` can go."""
    from vllm.device_allocator.cumem import CuMemAllocator

    source = inspect.getsource(CuMemAllocator._python_free_callback)
    assert "self.pointer_to_data.pop(ptr)" in source
    assert "if data.is_asleep and current_platform.is_rocm():" in source
