"""Proofs about models that are alike are made once in a process of tests.

Each trainer proves how its rows may share a pass and what they begin with (`unbroken.training.model.probes`), in 70 ms
for a tiny model: a tenth of what `make test` computed, of a few dozen kinds of models. What a proof depends on is
compared here, but for the values of weights; whatever cannot be compared is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import torch

from unbroken.training.model import logprobs
from unbroken.training.model.logprobs import PolicyLogprobs


def remember_proofs() -> None:
    """From now on, in this process."""
    for name in ("find_difference", "find_packing_obstacle", "is_exact_by_rows"):
        setattr(logprobs, name, _remembered(getattr(logprobs, name)))


def _remembered(prove: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Hashable, Any] = {}

    @wraps(prove)
    def look_up(model: Any, *others: Any) -> Any:
        kind = _describe(model)
        if kind is None:
            return prove(model, *others)
        if (kind, others) not in known:
            known[kind, others] = prove(model, *others)
        return known[kind, others]

    return look_up


def _describe(model: Any) -> Hashable | None:
    """What the proofs about a model depend on; None if some of it cannot be compared."""
    parts = list(model.modules())
    if torch.distributed.is_initialized() or any(map(_is_changed, parts)):
        return None
    causal, own = model, ()
    if isinstance(model, PolicyLogprobs):
        causal = model.causal
        own = tuple((name, each) for name, each in vars(model).items() if isinstance(each, int | float | str | None))
    return (
        own,
        causal.config.to_json_string(use_diff=False),
        causal.config.get_text_config()._attn_implementation,
        tuple((type(part), part.training, _name_forward(part)) for part in parts),
        tuple((each.shape, each.dtype, each.device, each.requires_grad) for each in model.parameters()),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    )


def _is_changed(part: torch.nn.Module) -> bool:
    """Whether it computes something else than its class says."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    own = _name_forward(part)
    return any(hooks) or not own.startswith("unbroken.") or part._compiled_call_impl is not None


def _name_forward(part: torch.nn.Module) -> str:
    """The function that a module has in place of its class's, which trainers of ours give to norms."""
    forward = vars(part).get("forward")
    return "unbroken." if forward is None else f"{forward.__module__}.{getattr(forward, '__qualname__', '')}"
