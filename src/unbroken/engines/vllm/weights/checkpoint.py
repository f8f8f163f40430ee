"""Which weights a model has, read once from the headers of its checkpoint, and new ones as files for the workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.errors import EngineError, SamplingError

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 2**30
_WRAPPERS = frozenset({"model", "language_model", "vision_model"})
"""Parts of names that a model in memory and its checkpoint often have at different places."""
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShapes:
    """Names and shapes of all weights in a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]
    tied_to: str | None = None
    """Name of the embedding that the output head shares; the head may then come too, with the same values."""
    _by_short_name: Mapping[str, str] = field(init=False, repr=False)
    """The names by what is left of them without wrappers, as far as that tells them apart.

    transformers saves image-text models under other names than the model's own: `model.language_model.norm.weight`
    becomes `model.norm.weight`, because that is how the hub has it.
    """

    def __post_init__(self) -> None:
        found: dict[str, list[str]] = {}
        for name in self.shapes:
            found.setdefault(_without_wrappers(name), []).append(name)
        unique = {short: names[0] for short, names in found.items() if len(names) == 1}
        object.__setattr__(self, "_by_short_name", unique)

    @staticmethod
    def of_checkpoint(folder: Path, *, tied: bool) -> WeightShapes:
        """Read the headers of the safetensors files in `folder`.

        Args:
            folder: where the model's files are.
            tied: whether embedding and output head are one tensor.

        Raises:
            EngineError: there are no such files.
        """
        shapes = shapes_in(folder)
        if not shapes:
            raise EngineError(
                f"new weights cannot be checked: {folder} has no *.safetensors files to read the model's names and "
                "shapes from"
            )
        if not tied:
            return WeightShapes(shapes=shapes)
        shapes.pop(_HEAD, None)
        return WeightShapes(shapes=shapes, tied_to=next((n for n in shapes if n.endswith("embed_tokens.weight")), None))

    def checkpoint_names(self, given: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
        """The checkpoint's name for each of the weights of an update, which come as names and shapes.

        Raises:
            SamplingError: an unknown, repeated or missing name, or another shape.
        """
        found: list[str] = []
        seen: set[str] = set()
        for own, shape in given:
            name = self._own_name(own)
            self._check(name, shape, seen)
            seen.add(name)
            found.append(name)
        self._check_missing(seen)
        return found

    def check_one(self, given: str, shape: Sequence[int]) -> None:
        """Raise `SamplingError` unless the model has such a weight."""
        self._check(self._own_name(given), shape, set())

    @property
    def tied(self) -> tuple[str, str] | None:
        """Names of the output head and the embedding that it shares, whose values must agree if both come."""
        return None if self.tied_to is None else (_HEAD, self.tied_to)

    def checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of an update, one at a time, under the names of the checkpoint; a tied head is left out.

        They may have those names, or those that the model has in memory (`named_parameters`).

        Raises:
            SamplingError: an unknown, repeated or missing name, another shape, or a tied head with other values. The
                missing ones and the head are known at the end only.
        """
        tied: dict[str, torch.Tensor] = {}
        seen: set[str] = set()
        for given, tensor in weights:
            name = self._own_name(given)
            self._check(name, tensor.shape, seen)
            seen.add(name)
            if self.tied_to is not None and name in (_HEAD, self.tied_to):
                tied[name] = tensor.detach()
            if name != _HEAD or self.tied_to is None:
                yield name, tensor
        self._check_all(seen, tied)

    def write(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write `weights` to safetensors files in `folder`, a gigabyte each: an iterator is never held as a whole.

        Raises:
            SamplingError: as `checked`.
        """
        from safetensors.torch import save_file

        shard: dict[str, torch.Tensor] = {}
        number = 0
        for number, (name, tensor) in enumerate(self.checked(weights), 1):
            shard[name] = _own_copy(tensor)
            if sum(map(_num_bytes, shard.values())) >= _SHARD_BYTES:
                save_file(shard, folder / f"{number:06}.safetensors")
                shard = {}
        if shard:
            save_file(shard, folder / f"{number:06}.safetensors")

    def _own_name(self, given: str) -> str:
        """The checkpoint's name for a weight; if it has none, as it is."""
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

    def _check_all(self, written: set[str], seen: Mapping[str, torch.Tensor]) -> None:
        self._check_missing(written)
        if _HEAD in seen and not (seen[_HEAD].to(seen[self.tied_to or ""].device) == seen[self.tied_to or ""]).all():
            raise SamplingError(
                f"weights {_HEAD!r} and {self.tied_to!r} are tied in the model, but their values differ"
            )


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in the safetensors files of a folder, from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def checkpoint_folder(model: str, *, revision: str | None, download_dir: str | None) -> Path:
    """The folder with the files of a model that vLLM has loaded, itself a folder or a name on the hub.

    Raises:
        EngineError: it is not on this machine.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise EngineError(f"the files of {model!r} are not on this machine: {error}") from error


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, and sharing memory with nobody: safetensors refuses tensors that share."""
    on_cpu = tensor.detach().cpu().contiguous()
    return on_cpu.clone() if on_cpu.data_ptr() == tensor.data_ptr() else on_cpu
