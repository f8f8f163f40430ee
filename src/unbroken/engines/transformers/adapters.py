"""Adapters by name in the embedded engine: each row of a pass has its own, computed beside the weights.

    slots        0        1        2        3
    adapters     solver   solver   critic   none
    x W          of all rows at once
    + x A' B'    of rows 0 and 1 by solver's matrices, of row 2 by critic's

With exact numerics each row is computed as the trainer does, by W + B A of its adapter, which is kept once it was
needed: a product of rows 0 and 1, one of row 2 and one of row 3, each filled up to a multiple of rows (`exactness`).

An update of several policies has the matrices of all of them, each under its name (`weights.adapters`), and replaces
all that were there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import linear, pad

from unbroken.engines.transformers.weights import check_update
from unbroken.errors import SamplingError
from unbroken.weights.adapters import A, B
from unbroken.weights.sources import TensorSpec

BASE = 0
"""The number of the model itself."""


class RowAdapters:
    """The adapters of one model, by name and by number. Only the engine's worker changes them."""

    def __init__(self, *, exact_multiple: int | None = None) -> None:
        """With an `exact_multiple` adapters are merged, and products have multiples of so many rows."""
        self._exact_multiple = exact_multiple
        self._numbers: dict[str, int] = {}
        self._matrices: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        """A and B by the name of the linear layer, and by the adapter's number."""
        self._merged: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        """W + B A likewise, of those that rows had since the last update."""
        self._changed: set[str] = set()
        """The layers that compute with adapters, if their rows have some."""
        self._rows: list[tuple[int, torch.Tensor]] = []
        """The numbers of the next pass, and the rows of each; empty if all have the model itself."""
        self._num_rows = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may have."""
        return tuple(self._numbers)

    @property
    def numbers(self) -> frozenset[int]:
        """Those of these names, and of the model itself."""
        return frozenset({BASE, *self._numbers.values()})

    def check_none(self) -> None:
        """Raise `SamplingError` for an update of one policy in the place of several."""
        if self._numbers:
            raise SamplingError(
                f"an update of this engine must have the adapters of the policies {list(self._numbers)}, each matrix "
                "named POLICY/NAME, and it names none"
            )

    def get_number(self, name: str | None) -> int:
        """The number of an adapter; raises `SamplingError` for one that the engine does not have."""
        if name is None:
            return BASE
        if name not in self._numbers:
            raise SamplingError(f"adapter must be one of {list(self._numbers)} of this engine, got {name!r}")
        return self._numbers[name]

    def load(self, model: nn.Module, given: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the matrices of each adapter of `model` by name, in the place of all that were there.

        Names keep their numbers, and those that came with an earlier update alone are forgotten.

        Raises:
            SamplingError: a matrix is missing, is of no linear layer, or has another shape; nothing was changed.
        """
        layers = _find_layers(model, given)
        # A number stays that of its name: rows that run have it.
        free = max(self._numbers.values(), default=BASE) + 1
        fresh = [name for name in given if name not in self._numbers]
        kept = {name: number for name, number in self._numbers.items() if name in given}
        self._numbers = kept | {name: free + place for place, name in enumerate(fresh)}
        self._matrices = {
            path: {
                self._numbers[name]: _take(layer, tensors, path)
                for name, tensors in given.items()
                if path + A in tensors
            }
            for path, layer in layers.items()
        }
        self._merged.clear()
        for path in layers.keys() - self._changed:
            self._change(path, layers[path])

    def _change(self, path: str, layer: nn.Linear) -> None:
        """Let a layer compute with the adapters of its rows from now on."""
        if self._exact_multiple is None:
            layer.register_forward_hook(partial(self._add, path))
        else:
            layer.forward = partial(self._compute_merged, path, layer)  # type: ignore[method-assign]
        self._changed.add(path)

    def choose(self, numbers_R: NDArray[np.int64], device: torch.device) -> None:
        """Set the adapter of each row of the next pass."""
        self._num_rows = len(numbers_R)
        numbers = sorted(set(numbers_R.tolist()))
        if numbers == [BASE]:
            numbers = []
        self._rows = [(number, torch.from_numpy(np.flatnonzero(numbers_R == number)).to(device)) for number in numbers]

    def _add(self, path: str, _: nn.Module, inputs: Any, output_RTE: torch.Tensor) -> torch.Tensor:
        """The layer's result, plus x A' B' of the rows that have an adapter."""
        matrices = self._matrices.get(path)
        if not matrices or not self._rows:
            return output_RTE
        (x_RTD,) = inputs
        self._check_rows(path, x_RTD)
        for number, rows in self._rows:
            if number in matrices:
                a_KD, b_EK = matrices[number]
                if len(rows) == self._num_rows:  # one adapter for all: nothing is picked out
                    return output_RTE.add_((x_RTD @ a_KD.T) @ b_EK.T)
                output_RTE.index_add_(0, rows, (x_RTD[rows] @ a_KD.T) @ b_EK.T)
        return output_RTE

    def _compute_merged(self, path: str, layer: nn.Linear, x_RTD: torch.Tensor) -> torch.Tensor:
        """The layer's result, of each row by the weights with its adapter: a product for each adapter."""
        if not self._rows:
            return linear(x_RTD, layer.weight, layer.bias)
        self._check_rows(path, x_RTD)
        assert self._exact_multiple is not None, "without it layers have hooks"
        output_RTE = x_RTD.new_empty(*x_RTD.shape[:2], len(layer.weight))
        for number, rows in self._rows:
            x_ND = x_RTD[rows].flatten(0, 1)
            filled = pad(x_ND, (0, 0, 0, -len(x_ND) % self._exact_multiple))
            found = linear(filled, self._merge(path, layer, number), layer.bias)[: len(x_ND)]
            output_RTE[rows] = found.view(len(rows), x_RTD.shape[1], -1)
        return output_RTE

    def _merge(self, path: str, layer: nn.Linear, number: int) -> torch.Tensor:
        """The layer's weight with an adapter, as `UpdateLoader` merges the one of a single policy."""
        matrices = self._matrices.get(path, {})  # none of a layer that earlier updates alone had adapters of
        if number not in matrices:
            return layer.weight
        merged = self._merged[path]
        if number not in merged:
            a_KD, b_EK = matrices[number]
            merged[number] = layer.weight + b_EK @ a_KD
        return merged[number]

    def _check_rows(self, path: str, x_RTD: torch.Tensor) -> None:
        """Raise `RuntimeError` for a layer that does not get its rows one by one."""
        if x_RTD.dim() != 3 or len(x_RTD) != self._num_rows:
            raise RuntimeError(
                f"{path} computes rows together, as experts do, in the shape {tuple(x_RTD.shape)} for {self._num_rows} "
                "rows: which of them has which adapter is not known there"
            )


def _find_layers(model: nn.Module, given: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, nn.Linear]:
    """The layers that adapters change, by name; raises `SamplingError` if one is not as the model's, or not linear."""
    layers: dict[str, nn.Linear] = {}
    for tensors in given.values():
        specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
        check_update(model, specs, is_whole=True, sums=None)
        for path in [name.removesuffix(A) for name in tensors if name.endswith(A)]:
            layer = model.get_submodule(path)
            if not isinstance(layer, nn.Linear):
                raise SamplingError(f"an adapter of one row among others must be of linear layers, got one of {path!r}")
            layers[path] = layer
    return layers


def _take(layer: nn.Linear, tensors: Mapping[str, torch.Tensor], path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of A and B in the type of the layer that they are added to."""
    weight = layer.weight
    a, b = (tensors[path + ending].detach().to(weight.device, weight.dtype, copy=True) for ending in (A, B))
    return a, b
