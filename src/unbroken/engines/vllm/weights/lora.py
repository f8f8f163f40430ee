"""Adapters in vLLM's workers, made from tensors; vLLM 0.32 itself loads them from folders only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.transfer.adapters import A, B
from unbroken.transfer.sources import NamedTensors

_PREFIX = "base_model.model."
"""Of all names in files of PEFT."""


def find_lora_modules(model_runner: Any) -> list[str]:
    """Return the last parts of the names of modules that take adapters, as a checkpoint names them."""
    manager = model_runner.lora_manager._adapter_manager
    packed: Mapping[str, list[str]] = manager.packed_modules_mapping
    return sorted({part for module in manager.supported_lora_modules for part in packed.get(module, [module])})


def keep_adapter(model_runner: Any, number: int, tensors: NamedTensors, modules: Mapping[str, str], rank: int) -> None:
    """Register an adapter with vLLM's manager and put it into a slot.

    It is pinned in the manager's memory, from which vLLM could not load it again; slots are given and taken by vLLM.
    The scaling is in B, so the adapter's alpha is its rank.
    """
    from vllm.lora.peft_helper import PEFTHelper

    workers_manager = model_runner.lora_manager
    manager = workers_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = workers_manager._lora_model_cls.from_lora_tensors(
        lora_model_id=number,
        # Copies: the tensors may be views of memory that is about to go.
        tensors={_PREFIX + _rename(name, modules): tensor.to("cpu", copy=True) for name, tensor in tensors},
        peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=workers_manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    if len(manager) + 1 > manager.capacity:
        manager.remove_oldest_adapter()
    manager.add_adapter(adapter)
    manager._pin_lora_in_cpu_cache(number)
    manager.activate_adapter(number)


def _rename(name: str, modules: Mapping[str, str]) -> str:
    ending = A if name.endswith(A) else B
    return modules[name.removesuffix(ending)] + ending
