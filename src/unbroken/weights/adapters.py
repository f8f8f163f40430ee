"""LoRA adapters as the weights of an update: two matrices for each adapted weight, under names that no checkpoint has.

    model.layers.0.self_attn.q_proj.lora_A.weight    A [r, in]
    model.layers.0.self_attn.q_proj.lora_B.weight    B [out, r], times the adapter's scaling
    added to model.layers.0.self_attn.q_proj.weight  B A [out, in]

The scaling is in B, so nothing is needed beside the tensors, whatever the ranks and scalings of the modules: every
transport carries an adapter as it carries whole weights. An adapter replaces the one before it.

An update of several policies (`rollout.policies`) has the adapter of each, under its name and a slash:

    solver/model.layers.0.self_attn.q_proj.lora_A.weight    critic@40/model.layers.0.self_attn.q_proj.lora_A.weight
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from unbroken.errors import SamplingError

A, B = ".lora_A.weight", ".lora_B.weight"
Shape: TypeAlias = Sequence[int]
Tensor = TypeVar("Tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeight:
    """A weight of the model, and the matrices that are given for it."""

    name: str
    """The weight's name in the model."""
    given: str
    """The module's name in the update: `given` + `A` and `given` + `B` are there."""
    rank: int


def is_adapter(names: Collection[str]) -> bool:
    """Whether the weights of an update are an adapter; `SamplingError` if only some of them are."""
    found = [name for name in names if name.endswith((A, B))]
    if found and len(found) < len(names):
        other = next(name for name in names if not name.endswith((A, B)))
        raise SamplingError(
            f"an update must have whole weights or an adapter, got both: {other!r} is a weight and {found[0]!r} a part "
            "of an adapter"
        )
    return bool(found)


def split_policies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]] | None:
    """The matrices of each policy of an update of several, by the names of one; None if it is of one, without names.

    Raises:
        SamplingError: some matrices are of a policy, and others are not.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors:
        policy, _, name = full.rpartition("/")
        found.setdefault(policy, {})[name] = tensor
    if "" not in found:
        return found or None
    if len(found) > 1:
        raise SamplingError(f"an update must name a policy for each matrix or for none, got some for {list(found)}")
    return None


def match_adapters(
    given: Mapping[str, Shape], find: Callable[[str], tuple[str, Shape | None]]
) -> dict[str, list[AdaptedWeight]]:
    """Check the matrices of an adapter, given by name and shape, and find the weight of each pair.

    `find` returns the model's own name of a weight, and its shape if the model has it. The result is by the name of the
    policy, which is empty for one without a name.

    Raises:
        SamplingError: one matrix of a pair is missing, the model has no such weight, or a shape does not fit; or only
            some matrices are of a policy.
    """
    policies = split_policies(given.items()) or {"": dict(given)}
    return {
        policy: [_match(module, own, find) for module in dict.fromkeys(map(_find_module, own))]
        for policy, own in policies.items()
    }


def _find_module(name: str) -> str:
    return name.removesuffix(A).removesuffix(B)


def _match(module: str, given: Mapping[str, Shape], find: Callable[[str], tuple[str, Shape | None]]) -> AdaptedWeight:
    for ending, other in ((A, B), (B, A)):
        if module + ending not in given:
            raise SamplingError(f"adapter matrix {module + ending!r} is missing: {module + other!r} came alone")
    name, shape = find(f"{module}.weight")
    if shape is None:
        raise SamplingError(
            f"the adapter has module {module!r}, and the model has no weight named {module + '.weight'!r}"
        )
    of_a, of_b = tuple(given[module + A]), tuple(given[module + B])
    rank = of_a[0] if of_a else 0
    if len(shape) != 2 or rank < 1 or of_a != (rank, shape[1]) or of_b != (shape[0], rank):
        raise SamplingError(
            f"the adapter of {module!r} must have lora_A [rank, in] and lora_B [out, rank] for a weight [out, in] of "
            f"shape {tuple(shape)}, got {of_a} and {of_b}"
        )
    return AdaptedWeight(name=name, given=module, rank=rank)
