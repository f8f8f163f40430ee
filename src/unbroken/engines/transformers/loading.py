"""New weights for a module: checked as a whole before the first of them is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unbroken.errors import SamplingError


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
