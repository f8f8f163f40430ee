"""Proofs about models that are alike are made once in a process of tests.

Each trainer proves how its rows may share a pass and what they begin with (`unbroken.training.model.probes`), and that
its logprobs are those of the model's own forward; each engine, that it computes with a cache what it does without. That
is 90 ms for a tiny model, a tenth of what `make test` computed, of a few dozen kinds of models. What a proof depends on
is compared here, but for the values of weights; whatever cannot be compared is proven. An exception is not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from accelerate.state import AcceleratorState

from unbroken import exactness
from unbroken.engines.transformers import forward
from unbroken.engines.transformers.forward import SlotForward
from unbroken.engines.transformers.images import ImageModel
from unbroken.images.processor import HfImageProcessor
from unbroken.training.model import logprobs
from unbroken.training.model.logprobs import PolicyLogprobs

_PLAIN = (bool, int, float, str, type(None), Enum)
_KNOWN_CODE = ("unbroken.", "transformers.", "accelerate.utils.operations.convert_outputs_to_fp32")
"""Modules whose functions are the same wherever they have the same name, as a module's own forward or as its hook."""


def remember_proofs() -> None:
    """From now on, in this process."""
    _remember(logprobs, "find_difference", "find_packing_obstacle", "is_exact_by_rows", "find_length_dependence")
    _remember(forward, "find_length_dependence", "_check_agreement", "_check_images")
    _remember(exactness, "find_other_bits", "_find_other_product")
    for module in (logprobs, forward):
        module.choose_attention = _choose_attention_once(module.choose_attention)
    PolicyLogprobs._check_against_forward = _check_once(PolicyLogprobs._check_against_forward)


def _remember(module: ModuleType, *names: str) -> None:
    for name in names:
        setattr(module, name, _remembered(getattr(module, name)))


def _remembered(prove: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Hashable, Any] = {}

    @wraps(prove)
    def look_up(model: Any, *others: Any) -> Any:
        kind = _describe(model)
        if kind is None:
            return prove(model, *others)
        key = kind, *(each for each in others if not isinstance(each, ImageModel))  # which is described with its engine
        if key not in known:
            known[key] = prove(model, *others)
        return known[key]

    return look_up


def _check_once(check: Callable[..., None]) -> Callable[..., None]:
    """As `_remembered`, of what leaves the model in training mode."""
    known: set[Hashable] = set()

    @wraps(check)
    def look_up(policy: Any, ids_BT: torch.Tensor, pixels: Any) -> None:
        tensors = {} if pixels is None else pixels.tensors
        kind = _describe(policy), ids_BT.shape, *((name, each.shape) for name, each in tensors.items())
        if kind[0] is None or kind not in known:
            check(policy, ids_BT, pixels)
            known.add(kind)
        policy.model.train()

    return look_up


def _choose_attention_once(choose: Callable[[Any], None]) -> Callable[[Any], None]:
    """As `_remembered`, of models that keep the attention that they have."""
    kept: set[Hashable] = set()

    @wraps(choose)
    def look_up(model: Any) -> None:
        kind = _describe(model)
        if kind is not None and kind in kept:
            return
        choose(model)
        if kind is not None and kind == _describe(model):
            kept.add(kind)

    return look_up


def _describe(model: Any) -> Hashable | None:
    """What the proofs about a model depend on; None if some of it cannot be compared."""
    causal, own = model, ()
    if isinstance(model, PolicyLogprobs):
        causal, own = model.causal, _list_plain(model)
    elif isinstance(model, SlotForward):
        processor = None if model.images is None else model.images.processor
        if model.routers is not None or type(processor) not in (type(None), HfImageProcessor):
            return None
        causal, own = model.model, (*_list_plain(model), processor and processor.description)
    parts = list((causal if isinstance(model, SlotForward) else model).modules())
    code = [_list_code(part) for part in parts]
    if torch.distributed.is_initialized() or None in code:
        return None
    return (
        own,
        causal.config.to_json_string(use_diff=False),
        causal.config.get_text_config()._attn_implementation,
        tuple((type(part), names, _list_settings(part)) for part, names in zip(parts, code, strict=True)),
        tuple((each.shape, each.dtype, each.device, each.requires_grad) for each in causal.parameters()),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        AcceleratorState._shared_state.get("_mixed_precision"),
        torch.get_num_threads(),
    )


def _list_plain(part: Any) -> tuple[tuple[str, Hashable], ...]:
    """The plain values that an object has."""
    return tuple((name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN))


def _list_settings(part: torch.nn.Module) -> tuple[Hashable, ...]:
    """What a module was made with, or rotary embeddings were changed to. torch's own attributes begin with `_`."""
    found = [value for name, value in vars(part).items() if name[0] != "_" and isinstance(value, _PLAIN)]
    return (*found, str(vars(part).get("rope_type")))


def _list_code(part: torch.nn.Module) -> tuple[str, ...] | None:
    """The names of the functions that a module has in place of its class's or beside them; None if one may differ."""
    found = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    if own := vars(part).get("forward"):
        found.append(own)
    names = tuple(f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', '')}" for each in found)
    is_changed = part._backward_hooks or part._backward_pre_hooks or part._compiled_call_impl is not None
    return None if is_changed or not all(name.startswith(_KNOWN_CODE) for name in names) else names
