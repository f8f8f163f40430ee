"""Adapters of updates, merged into the weights of the embedded engine.

Each update begins with the weights of the start, which are kept on the CPU: subtracting the adapter before would leave
its rounding errors behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unbroken.engines.checks import check_same_kind
from unbroken.errors import SamplingError
from unbroken.weights.adapters import A, AdaptedWeight, B, Shape, is_adapter, match_adapters
from unbroken.weights.sources import NamedTensors, TensorSpec, WeightStream, check_floating

Named = Sequence[tuple[str, torch.Tensor]]


class UpdateLoader:
    """Loads updates into one model: whole weights as they are, adapters merged."""

    def __init__(self) -> None:
        self._base: dict[str, torch.Tensor] = {}
        """The first values of each weight that has ever been adapted."""
        self._is_changed = False
        """Whether whole weights have replaced the first ones."""

    def check_kind(self, *, is_adapter: bool, policy_version: int, names_policies: bool = False) -> None:
        """Raise `SamplingError` if an adapter follows whole weights, or the other way round; see `check_same_kind`.

        Nor may adapters of several policies, which are not merged, follow the one of a single policy.
        """
        if names_policies and self._base:
            raise SamplingError(
                f"the adapter of policy version {policy_version} is merged into the weights, to which those of several "
                "policies would be added: start the engine again"
            )
        check_same_kind(
            is_adapter=is_adapter, had_adapter=bool(self._base), policy_version=policy_version, changed=self._is_changed
        )

    def copy(self, model: torch.nn.Module, tensors: NamedTensors) -> None:
        """Copy a part of an update into `model`, whose names and shapes were checked; the rest must follow."""
        self._is_changed = True
        targets = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in tensors:
                targets[name].copy_(tensor)

    def load(
        self, model: torch.nn.Module, tensors: NamedTensors, *, policy_version: int, is_whole: bool = False
    ) -> None:
        """Load the tensors of an update into `model`, all or none; `policy_version` is the one in use.

        With `is_whole` they must be an adapter, or all of the model's weights.

        Raises:
            SamplingError: as `load_into`, `match_adapters`, `check_same_kind` and `_check_whole`.
        """
        is_stream = isinstance(tensors, WeightStream) and not tensors.is_kept
        weights: WeightStream | Named = WeightStream.of(tensors) if is_stream else list(tensors)
        shapes = _list_shapes(weights)
        adapts = is_adapter(list(shapes))
        self.check_kind(is_adapter=adapts, policy_version=policy_version)
        if is_whole and not adapts:
            _check_whole(model, shapes)
        if adapts:
            load_into(model, self._merge_all(model, dict(weights)))
        elif isinstance(weights, WeightStream):  # one after the other, so that the update is in memory once
            _copy_into(model, weights)
        else:
            load_into(model, weights)
        self._is_changed = not adapts

    def _merge_all(self, model: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> Named:
        """Each weight that has an adapter, merged, and those that had one before, as they were at first."""
        targets = model.state_dict(keep_vars=True)
        (adapted,) = _match_adapters(targets, {name: tensor.shape for name, tensor in given.items()}).values()
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


def _list_shapes(weights: WeightStream | Named) -> dict[str, Shape]:
    """By name; those of a stream are known before its values."""
    if isinstance(weights, WeightStream):
        return {spec.name: spec.shape for spec in weights.specs}
    return {name: tuple(tensor.shape) for name, tensor in weights}


def _check_whole(model: torch.nn.Module, shapes: Mapping[str, Shape]) -> None:
    """Raise `SamplingError` as `_check_names`, or if a parameter is missing; a tied one has several."""
    _check_names(model, shapes)
    given = {weight.data_ptr() for name, weight in model.state_dict(keep_vars=True).items() if name in shapes}
    missing = [name for name, weight in model.named_parameters() if weight.data_ptr() not in given]
    if missing:
        raise SamplingError(
            f"a version of the weights must have all of them: {len(missing)} are missing, first {missing[0]!r}"
        )


def check_update(
    model: torch.nn.Module, specs: Mapping[str, TensorSpec], *, is_whole: bool, sums: Mapping[str, int] | None
) -> None:
    """Check weights that a sender announces; see `CheckWeights`."""
    check_floating(specs.values())
    shapes = {name: spec.shape for name, spec in specs.items()}
    targets = model.state_dict(keep_vars=True)
    if is_adapter(shapes):
        if is_whole:  # a part may have one matrix of two
            _match_adapters(targets, shapes)
    elif is_whole:
        _check_whole(model, shapes)
    else:
        _check_names(model, shapes)
    by_storage: dict[int, str] = {}
    for name, total in (sums or {}).items():
        if name in targets and (sums or {})[(twin := by_storage.setdefault(targets[name].data_ptr(), name))] != total:
            raise SamplingError(f"weights {twin!r} and {name!r} are tied in the model, but their new values differ")


def _check_names(model: torch.nn.Module, given: Mapping[str, Shape]) -> None:
    """Raise `SamplingError` for names or shapes of an update that the model lacks."""
    targets = model.state_dict(keep_vars=True)
    if is_adapter(given):
        _match_adapters(targets, given)
        return
    for name, shape in given.items():
        _check(targets, name, shape)


def _copy_into(model: torch.nn.Module, stream: WeightStream) -> None:
    """Copy weights that are made as they are read into `model`, once their names and shapes are checked.

    Raises:
        SamplingError: no weights, a name or shape that the model lacks, or a repeated name; nothing was copied.
        RuntimeError: the stream failed, and the model has some of the new weights.
    """
    shapes = {spec.name: spec.shape for spec in stream.specs}
    if not shapes:
        raise SamplingError("weights is empty: nothing to load")
    if len(shapes) < len(stream.specs):
        raise SamplingError("a weight came twice")
    _check_names(model, shapes)
    targets = model.state_dict(keep_vars=True)
    try:
        with torch.no_grad():
            for name, tensor in stream:
                targets[name].copy_(tensor)
    except Exception as error:
        raise RuntimeError(f"the new weights ended in between: {error!r}") from error


def _match_adapters(targets: Mapping[str, torch.Tensor], given: Mapping[str, Shape]) -> dict[str, list[AdaptedWeight]]:
    return match_adapters(given, lambda name: (name, targets[name].shape if name in targets else None))


def _check(targets: Mapping[str, torch.Tensor], name: str, shape: Shape) -> None:
    if name not in targets:
        raise SamplingError(f"the model has no weight named {name!r}; its names begin with {next(iter(targets))!r}")
    if tuple(shape) != targets[name].shape:
        raise SamplingError(f"weight {name!r} must have shape {tuple(targets[name].shape)}, got {tuple(shape)}")


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
        if name in sources:
            raise SamplingError(f"weight {name!r} came twice")
        _check(targets, name, tensor.shape)
        twin = by_storage.setdefault(targets[name].data_ptr(), name)
        if twin != name and not torch.equal(sources[twin], tensor):
            raise SamplingError(f"weights {twin!r} and {name!r} are tied in the model, but their new values differ")
        sources[name] = tensor
    with torch.no_grad():
        for name, tensor in sources.items():
            targets[name].copy_(tensor)
