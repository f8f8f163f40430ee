"""Names and shapes of a model's weights, read from the headers of its checkpoint; updates are checked against them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.errors import EngineError, SamplingError
from unbroken.weights.files import FileSource
from unbroken.weights.sources import TiedNames

if TYPE_CHECKING:
    import torch

_WRAPPERS = frozenset({"model", "language_model", "vision_model"})
"""Parts of names that a model in memory and its checkpoint often have in different places."""
_HEAD = "lm_head.weight"
_JOINED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
"""Weights of all experts of a layer in one tensor [E, ...], which transformers has in memory and no checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The checkpoint's names of the weights of single experts that are joined in memory.

    `m.experts.gate_up_proj` [E, 2 * I, H] is `m.experts.0.gate_proj.weight` [I, H], `m.experts.0.up_proj.weight`, and
    so on.
    """

    prefix: str
    kinds: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """All names in one text, which no weight has as its name: `m.experts.*.gate_proj+up_proj`."""
        return f"{self.prefix}.*.{'+'.join(self.kinds)}"

    @staticmethod
    def of_pattern(name: str) -> ExpertNames | None:
        """The inverse of `pattern`; None for the name of a weight."""
        prefix, star, kinds = name.partition(".*.")
        return ExpertNames(prefix=prefix, kinds=tuple(kinds.split("+"))) if star else None

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of single experts, which share the memory of `tensor`."""
        for number, expert in enumerate(tensor):
            for kind, part in zip(self.kinds, expert.chunk(len(self.kinds)), strict=True):
                yield f"{self.prefix}.{number}.{kind}.weight", part

    def get_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of single experts, from that of all."""
        num_experts, rows, columns = shape
        names = [f"{self.prefix}.{number}.{kind}.weight" for number in range(num_experts) for kind in self.kinds]
        return dict.fromkeys(names, (rows // len(self.kinds), columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShapes:
    """Names and shapes of all weights in a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]
    tied_to: str | None = None
    """Name of the embedding that the output head shares; an update may then have the head too, with the same values."""
    _by_short_name: Mapping[str, str] = field(init=False, repr=False)
    """The names, by their form without wrappers, where that is unique.

    transformers saves image-text models under other names than the model's own, those of the hub:
    `model.language_model.norm.weight` becomes `model.norm.weight`.
    """

    def __post_init__(self) -> None:
        found: dict[str, list[str]] = {}
        for name in self.shapes:
            found.setdefault(_without_wrappers(name), []).append(name)
        unique = {short: names[0] for short, names in found.items() if len(names) == 1}
        object.__setattr__(self, "_by_short_name", unique)

    @staticmethod
    def of_checkpoint(folder: Path, *, tied: bool) -> WeightShapes:
        """Read the headers of the safetensors files in `folder`; `EngineError` if there are none.

        `tied` means that embedding and output head are one tensor.
        """
        shapes = FileSource(folder).shapes()
        if not shapes:
            raise EngineError(
                f"new weights cannot be checked: {folder} has no *.safetensors files to read the model's names and "
                "shapes from"
            )
        if not tied:
            return WeightShapes(shapes=shapes)
        shapes.pop(_HEAD, None)
        return WeightShapes(shapes=shapes, tied_to=next((n for n in shapes if n.endswith("embed_tokens.weight")), None))

    def match(self, given: Mapping[str, Sequence[int]]) -> tuple[dict[str, str], TiedNames | None]:
        """Find the checkpoint's name for each weight of an update, given by name and shape.

        Returns:
            The names of the weights to load (`find_names`); and the given names of a tied head and its embedding if the
            head came too, whose values must agree.

        Raises:
            SamplingError: an unknown, repeated or missing name, or another shape.
        """
        seen: set[str] = set()
        for own, shape in given.items():
            for name, part_shape in self._list_parts(own, shape).items():
                self._check(name, part_shape, seen)
                seen.add(name)
        self._check_missing(seen)
        names = self.find_names(given)
        if self.tied_to is None or _HEAD not in seen:
            return names, None
        by_name = {self._own_name(own): own for own in given}
        return names, (by_name[_HEAD], by_name[self.tied_to])

    def find_names(self, given: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Find the checkpoint's name for each weight to load of an update or a part of it, which is checked already; a
        tied head is left out, and joined experts have an `ExpertNames.pattern`.
        """
        found = {}
        for own, shape in given.items():
            experts = self._find_experts(own, shape)
            name = self._own_name(own) if experts is None else experts.pattern
            if name != _HEAD or self.tied_to is None:
                found[own] = name
        return found

    def find(self, given: str) -> tuple[str, tuple[int, ...] | None]:
        """Return the checkpoint's name for a weight, and its shape if the checkpoint has it."""
        name = self._own_name(given)
        return name, self.shapes.get(name)

    def check_one(self, given: str, shape: Sequence[int]) -> None:
        """Raise `SamplingError` unless the model has such a weight, or weights of single experts that it joins."""
        for name, part_shape in self._list_parts(given, shape).items():
            self._check(name, part_shape, set())

    def _list_parts(self, given: str, shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """The checkpoint's weights that a given one is: one, or those of the single experts that it joins."""
        experts = self._find_experts(given, shape)
        return {self._own_name(given): shape} if experts is None else experts.get_shapes(shape)

    def _find_experts(self, given: str, shape: Sequence[int]) -> ExpertNames | None:
        """Find the weights of single experts that a weight in memory joins; None for other weights."""
        match = _JOINED.fullmatch(given)
        if match is None or given in self.shapes or len(shape) != 3:
            return None
        kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        return ExpertNames(prefix=match[1], kinds=kinds)

    def _own_name(self, given: str) -> str:
        """Return the checkpoint's name for a weight, or the given name if the checkpoint has none."""
        return given if given in self.shapes else self._by_short_name.get(_without_wrappers(given), given)

    def _check(self, name: str, shape: Sequence[int], written: set[str]) -> None:
        expected = self.shapes.get(self.tied_to or "") if name == _HEAD and self.tied_to else self.shapes.get(name)
        if expected is None:
            raise SamplingError(
                f"the model has no weight named {name!r}; its names begin with {min(self.shapes)!r} "
                "(they are those of its checkpoint)"
            )
        if name in written:
            raise SamplingError(f"weight {name!r} came twice")
        if tuple(shape) != expected:
            raise SamplingError(f"weight {name!r} must have shape {expected}, got {tuple(shape)}")

    def _check_missing(self, written: set[str]) -> None:
        missing = self.shapes.keys() - written
        if missing:
            raise SamplingError(
                f"vLLM takes all weights or none: {len(missing)} of {len(self.shapes)} are missing, first "
                f"{min(missing)!r}" + ("" if written else " (an iterator that was used up before?)")
            )


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
