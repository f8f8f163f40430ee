"""Adapters of updates, merged into the weights of the embedded engine.

Each update begins with the weights of the start, which are kept on the CPU: subtracting the adapter before would leave
its rounding errors behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unbroken.engines.checks import check_same_kind
from unbroken.errors import SamplingError
from unbroken.transfer.adapters import A, AdaptedWeight, B, Shape, is_adapter, match_adapter

Named = Sequence[tuple[str, torch.Tensor]]


class UpdateLoader:
    """Loads updates into one model: whole weights as they are, adapters merged."""

    def __init__(self) -> None:
        self._base: dict[str, torch.Tensor] = {}
        """The first values of each weight that has ever been adapted."""
        self._is_changed = False
        """Whether whole weights have replaced the first ones."""

    def load(self, model: torch.nn.Module, tensors: Named, *, policy_version: int) -> None:
        """Load the tensors of an update into `model`, all or none; `policy_version` is the one in use.

        Raises:
            SamplingError: as `load_into`, `match_adapter` and `check_same_kind`.
        """
        given = dict(tensors)
        adapts = is_adapter(given)
        check_same_kind(
            is_adapter=adapts, had_adapter=bool(self._base), policy_version=policy_version, changed=self._is_changed
        )
        load_into(model, self._merge_all(model, given) if adapts else tensors)
        self._is_changed = not adapts

    def _merge_all(self, model: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> Named:
        """Each weight that has an adapter, merged, and those that had one before, as they were at first."""
        targets = model.state_dict(keep_vars=True)

        def find(name: str) -> tuple[str, Shape | None]:
            return name, targets[name].shape if name in targets else None

        adapted = match_adapter({name: tensor.shape for name, tensor in given.items()}, find)
        for one in adapted:
            if one.name not in self._base:
                self._base[one.name] = targets[one.name].detach().to("cpu", copy=True)
        merged = {one.name: self._merge(one, given, targets[one.name].device) for one in adapted}
        return list({**self._base, **merged}.items())

    def _merge(self, one: AdaptedWeight, given: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """W + B A in float32, rounded once."""
        base = self._base[one.name].to(device)
        a, b = (given[one.given + ending].detach().to(device, torch.float32) for ending in (A, B))
        return (base.float() + b @ a).to(base.dtype)


def load_into(module: torch.nn.Module, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Copy `weights` into `module`, all or none; devices and dtypes may differ, names left out keep their values.

    A tied weight may come under any of its names; under several, its values must agree.

    Raises:
        SamplingError: no weights, an unknown or repeated name, another shape, or tied names with unlike values.
    """
    if not weights:
        raise SamplingError("weights is empty: nothing to load (an iterator that was used up before?)")
    targets = module.state_dict(keep_vars=True)
    sources: dict[str, torch.Tensor] = {}
    by_storage: dict[int, str] = {}
    for name, tensor in weights:
        if name not in targets:
            raise SamplingError(f"the model has no weight named {name!r}; its names begin with {next(iter(targets))!r}")
        if name in sources:
            raise SamplingError(f"weight {name!r} came twice")
        if tensor.shape != targets[name].shape:
            raise SamplingError(
                f"weight {name!r} must have shape {tuple(targets[name].shape)}, got {tuple(tensor.shape)}"
            )
        twin = by_storage.setdefault(targets[name].data_ptr(), name)
        if twin != name and not torch.equal(sources[twin], tensor):
            raise SamplingError(f"weights {twin!r} and {name!r} are tied in the model, but their new values differ")
        sources[name] = tensor
    with torch.no_grad():
        for name, tensor in sources.items():
            targets[name].copy_(tensor)
