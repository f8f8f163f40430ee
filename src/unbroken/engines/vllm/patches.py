"""Patches of vLLM in its workers, for vLLM >= 0.32, < 0.34. A test of each fails once it is not needed.

**Prompt logprobs** at the temperature of their request, without LoRA adapters (`patch_prompt_logprobs`). vLLM 0.32 and
0.33 compute the logprobs of prompt ids at temperature 1, not at the request's. Where LoRA is on, they add to their
logits what the adapters of the rows that are *sampled* in the step would add to the head: the numbers of rows differ,
and on a CPU the engine dies (`einsum(): subscript b has size 5 for operand 1`). Only `VllmEngine.score` asks for prompt
logprobs, and it asks for the model's own. It is a patch of both model runners; not needed once
`test_scores_are_those_of_the_temperature_of_each_call` passes without it.

**Memory that sleeps** is mapped before it is freed (`map_on_free`). vLLM unmaps sleeping memory, and its C code unmaps
whatever is freed. An engine that is shut down in its sleep, because the run was ended during a step, so printed "CUDA
Error: invalid argument at .../cumem_allocator.cpp" for each allocation. vLLM leaves such memory out on ROCm only
(`CuMemAllocator._python_free_callback`). Mapping one allocation at a time needs no more memory than the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


def patch_prompt_logprobs(model_runner: Any) -> None:
    """Patch a worker's model runner; once."""
    if hasattr(model_runner, "prompt_logprobs_worker"):
        _patch_v2(model_runner)
    else:
        _patch_v1(model_runner)


def _patch_v1(runner: Any) -> None:
    compute: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict
    plain_logprobs = runner.sampler.compute_logprobs
    heads = _find_lora_heads(runner)

    def compute_by_temperature(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        waiting = runner.num_prompt_logprobs
        if not waiting:
            return {}
        found: dict[str, Any] = {}
        by_temperature = _group_by_temperature(waiting, lambda key: runner.requests[key].sampling_params.temperature)
        for temperature, keys in by_temperature.items():
            group = {key: waiting[key] for key in keys}
            runner.num_prompt_logprobs = group
            runner.sampler.compute_logprobs = lambda logits, t=temperature: plain_logprobs(logits / t)
            with _without_adapters(heads):
                found |= compute(hidden_states, num_scheduled_tokens)
            for key in keys:
                if key not in group:  # its prompt is whole
                    del waiting[key]
        runner.num_prompt_logprobs = waiting
        runner.sampler.compute_logprobs = plain_logprobs
        return found

    runner._get_prompt_logprobs_dict = compute_by_temperature


def _patch_v2(runner: Any) -> None:
    worker = runner.prompt_logprobs_worker
    if worker is None:
        return
    add_request = worker.add_request
    compute = worker.compute_prompt_logprobs
    temperatures = np.ones(worker.max_num_reqs)
    heads = _find_lora_heads(runner)

    def add_with_temperature(req_id: str, req_idx: int, sampling_params: Any) -> None:
        temperatures[req_idx] = sampling_params.temperature or 1.0
        add_request(req_id, req_idx, sampling_params)

    def compute_by_temperature(logits_of: Any, hidden_states: Any, input_batch: Any, *rest: Any) -> dict[str, Any]:
        wanted = worker.uses_prompt_logprobs.copy()
        slots = input_batch.idx_mapping_np
        found: dict[str, Any] = {}
        with _without_adapters(heads):
            for temperature in np.unique(temperatures[slots[wanted[slots]]]):
                worker.uses_prompt_logprobs = wanted & (temperatures == temperature)
                found |= compute(lambda states, t=temperature: logits_of(states) / t, hidden_states, input_batch, *rest)
        worker.uses_prompt_logprobs = wanted
        return found

    worker.add_request = add_with_temperature
    worker.compute_prompt_logprobs = compute_by_temperature


def _group_by_temperature(keys: Any, temperature_of: Callable[[str], float]) -> dict[float, list[str]]:
    """Group requests, in their order, which is that of all workers: each of them has a part of the logits.

    A set of texts has another order in each process, and parts of different prompts would be joined.
    """
    groups: dict[float, list[str]] = {}
    for key in keys:
        groups.setdefault(temperature_of(key) or 1.0, []).append(key)
    return groups


def _find_lora_heads(runner: Any) -> list[Any]:
    """Find the modules that add adapters to logits; none if LoRA is off."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    return [module for module in runner.get_model().modules() if isinstance(module, LogitsProcessorWithLoRA)]


class _NoAdapter:
    """Replaces the part of vLLM that multiplies by adapters."""

    @staticmethod
    def add_lora_logits(logits: Any, *_adapters: Any, **_options: Any) -> Any:
        return logits


@contextmanager
def _without_adapters(heads: list[Any]) -> Iterator[None]:
    kept = [head.punica_wrapper for head in heads]
    for head in heads:
        head.punica_wrapper = _NoAdapter
    yield
    for head, wrapper in zip(heads, kept, strict=True):
        head.punica_wrapper = wrapper


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
