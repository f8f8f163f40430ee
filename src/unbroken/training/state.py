"""A trainer's state in a folder that is there whole or not at all, and verified before it is loaded.

    __0_0.distcp  __1_0.distcp    the tensors that each process wrote, by torch.distributed.checkpoint
    .metadata                     which part of which tensor is in which of these files
    state.json                    counts, the model's origin, SHA-256 of each file, each process's generator and `extra`
    adapter_config.json           of a model with adapters, as PEFT writes it

Names of tensors: `weights.NAME` (of a model with adapters those that are trained), `optimizer.NAME.exp_avg` and others,
and `reference.NAME` of a reference that changes (`ReferenceSync`). Any number of processes, with tensors that are
sharded in any way, reads what any other wrote.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unbroken.errors import CheckpointError, InvalidInputError, WeightsError
from unbroken.training.model.adapters import strip_wrappers
from unbroken.training.model.pretrained import ADAPTER_CONFIG, ModelOrigin, write_adapter_config
from unbroken.training.model.sharding import shard_like
from unbroken.untrusted import MAX_ROWS_BYTES, read_json_file
from unbroken.weights.files import WeightFile, WeightFiles, describe_file
from unbroken.weights.folders import complete_folder, flush_to_disk, temporary_name

_STATE, _METADATA = "state.json", ".metadata"
_FORMAT_VERSION = 1
_METADATA_TYPES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "StorageMeta", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),  # the last: Python 3.13
}  # fmt: skip
"""What torch pickles into the metadata of tensors, besides dtypes. Of what is no tensor it would unpickle the data too,
whatever that does: `BytesStorageMetadata` is missing."""
_OF_PROCESS = " of process "
"""In the names of tensors that one process alone has."""
_QUANTISED = ". Quantised averages that are sharded continue with the same number of processes alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The numbers of a checkpoint."""

    policy_version: int
    num_updates: int
    processes: tuple[Mapping[str, Any], ...]
    """For each process, its generator's state as `rng` and the caller's `extra`."""
    frozen: str
    """A checksum of the weights that are not saved because they are not trained; empty if all are saved."""
    trained: tuple[str, ...]
    """Names of the trained parameters, in the optimizer's order."""
    model: ModelOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """A checkpoint that was read, but for its tensors."""

    folder: Path
    state: TrainerState

    def names(self, part: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Names, shapes and types of the tensors of one part, such as `weights`."""
        stored = self._read_metadata()
        return {
            name.removeprefix(f"{part}."): (tuple(tensor.size), str(tensor.properties.dtype))
            for name, tensor in stored.items()
            if name.startswith(f"{part}.") and isinstance(tensor, TensorStorageMetadata) and not _is_of_another(name)
        }

    def _read_metadata(self) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = _Reader(self.folder).read_metadata().state_dict_metadata
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{self.folder / _METADATA} cannot be read: {error}") from error
        return found

    @torch.no_grad()
    def load(self, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy one part into tensors of the same names, or into this process's parts of them. Nothing is communicated.

        Raises:
            CheckpointError: names, shapes or types differ, and nothing was copied; or a file cannot be read.
        """
        ours, theirs = {name: _describe(tensor) for name, tensor in tensors.items()}, self.names(part)
        if ours != theirs:
            name = next(name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))
            raise CheckpointError(
                f"{self.folder} must hold the {part} of this model: {name} is {ours.get(name)} in the model and "
                f"{theirs.get(name)} in the checkpoint{_QUANTISED if _OF_PROCESS in f'{[*ours, *theirs]}' else ''}"
            )
        self._read({f"{part}.{name}": tensor for name, tensor in tensors.items() if not _is_interleaved(tensor)})
        for name, tensor in tensors.items():
            if _is_interleaved(tensor):
                whole = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._read({f"{part}.{name}": whole})
                tensor.copy_(shard_like(whole, tensor))

    def find_difference(self, part: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """The name of the first of these tensors that is not stored with the same shape, type and bits, or of one that
        is stored only; None if all are equal. Raises `CheckpointError` if a file cannot be read.
        """
        ours, theirs = {name: _describe(tensor) for name, tensor in tensors.items()}, self.names(part)
        if ours != theirs:
            return next(name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))
        stored = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self.load(part, stored)
        return next((name for name, tensor in tensors.items() if not _has_same_bits(tensor, stored[name])), None)

    def _read(self, tensors: dict[str, torch.Tensor]) -> None:
        _ignore_one_process()
        try:
            load(tensors, storage_reader=_Reader(self.folder), no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{self.folder} cannot be read: {_find_cause(error)}") from error


def copy_tensors(tensors: Mapping[str, torch.Tensor], *, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Copy to the CPU's memory what this process writes: its shards, and a part of the tensors that all have whole."""
    rank, sizes = (0, [0]) if group is None else (dist.get_rank(group), [0] * dist.get_world_size(group))
    copied: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach()
        if not isinstance(own, DTensor) and _OF_PROCESS not in name:
            least = sizes.index(min(sizes))
            sizes[least] += own.nbytes
            if least != rank:
                continue
        elif isinstance(own, DTensor) and _is_interleaved(own):
            own = own.redistribute(
                placements=[Shard(p.dim) if isinstance(p, _StridedShard) else p for p in own.placements]
            )
        # The stager copies the storage of a tensor on a CPU, also where several shards of a file share it.
        copied |= {name: own.clone()} if own.device.type == "cpu" else BlockingAsyncStager().stage({name: own})
    return copied


def write_state(
    folder: Path,
    *,
    tensors: Mapping[str, torch.Tensor],
    state: TrainerState,
    adapter_config: Any = None,
    key: str,
    group: dist.ProcessGroup | None,
) -> None:
    """Write what `copy_tensors` copied. Each process of `group` calls it, with the same `key`, or one without a group.

    Raises:
        CheckpointError: a process cannot write its part; raised in all, and nothing is left of the checkpoint.
    """
    temporary = temporary_name(folder, key)

    def complete(files: Sequence[WeightFile]) -> None:
        described = {"format": _FORMAT_VERSION, **asdict(state), "files": [asdict(file) for file in files]}
        (temporary / _STATE).write_text(json.dumps(described, indent=1, allow_nan=False), "utf-8")
        if adapter_config is not None:
            write_adapter_config(temporary, adapter_config)
            flush_to_disk(temporary / ADAPTER_CONFIG)
        flush_to_disk(temporary / _STATE)
        complete_folder(temporary, folder)

    try:
        _ignore_one_process()
        save(dict(tensors), storage_writer=_Writer(temporary, complete), process_group=group, no_dist=group is None)
    except (CheckpointException, RuntimeError) as error:  # the second if another process has died
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: {_find_cause(error)}. Nothing is left of it, and earlier ones are "
            "unchanged; free space, or give another folder"
        ) from error
    finally:
        if group is None or dist.get_rank(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)


class _Reader(FileSystemReader):
    """Reads a checkpoint without running code of it: torch's own unpickles what a file names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata; `UnpicklingError` if it has more than tensors."""
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The type of this name, if the metadata of tensors may have it."""
        if (module, name) in _METADATA_TYPES or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it must describe tensors alone, and names {module}.{name}")


class _Writer(FileSystemWriter):
    """Writes a checkpoint's tensors, and completes it in the first process, once all have written theirs."""

    def __init__(self, folder: Path, complete: Callable[[Sequence[WeightFile]], None]) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # the tensors are on the CPU
        self._folder = folder
        self._complete = complete

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this process's file; its description goes to the first process with the results."""
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # torch.save's, on closing what it could not write
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        names = sorted({result.storage_data.relative_path for result in results})
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([*results, *(describe_file(self._folder / name) for name in names)])
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """In the first process, when all files are written."""
        every = [result for of_process in results for result in of_process]
        files = [result for result in every if isinstance(result, WeightFile)]
        super().finish(metadata, [[result for result in every if not isinstance(result, WeightFile)]])
        self._complete([*files, describe_file(self._folder / _METADATA)])


def read_state(folder: Path, *, process: int = 0, num_processes: int = 1, verifies_files: bool = True) -> StoredState:
    """Read a checkpoint. Each of several processes verifies a part of its files; for its numbers alone none need be.

    Raises:
        CheckpointError: it is incomplete or damaged.
    """
    try:
        found = read_json_file(folder / _STATE, max_bytes=MAX_ROWS_BYTES)
        if found["format"] != _FORMAT_VERSION:
            raise InvalidInputError(f"format must be {_FORMAT_VERSION}, got {found['format']!r}")
        state = TrainerState(
            policy_version=int(found["policy_version"]),
            num_updates=int(found["num_updates"]),
            processes=tuple(map(dict, found["processes"])),
            frozen=str(found["frozen"]),
            trained=tuple(found["trained"]),
            model=ModelOrigin(**found["model"]),
        )
        if not state.processes:
            raise InvalidInputError("processes must have at least one, got none")
        files = tuple(WeightFile(**file) for file in found["files"])
        if _METADATA not in {file.name for file in files}:
            raise InvalidInputError(f"files must have {_METADATA}, got {[file.name for file in files]}")
        if verifies_files:
            part = files[process::num_processes]
            WeightFiles(folder=folder, policy_version=state.policy_version, files=part).verify()
        return StoredState(folder=folder, state=state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, WeightsError) as error:
        raise CheckpointError(
            f"{folder} must hold a whole checkpoint: {type(error).__name__}: {error}. Remove the folder to go on from "
            "an earlier one"
        ) from error


def name_averages(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The optimizer's state by the names of its parameters: "model.norm.weight.exp_avg", "model.norm.weight.step"."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{strip_wrappers(name)}.{key}{inner}": part
        for name, parameter in zip(names, parameters, strict=True)
        for key, tensor in optimizer.state.get(parameter, {}).items()
        for inner, part in _flatten(tensor)
    }


def load_averages(optimizer: torch.optim.Optimizer, names: Sequence[str], stored: StoredState) -> None:
    """Load the optimizer's state; its learning rate and other settings stay. Raises as `StoredState.load` does."""
    known = stored.names("optimizer")
    if not known.keys() <= name_averages(optimizer, names).keys():
        _create_averages(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if not any(other.startswith(f"{strip_wrappers(name)}.") for other in known):
            optimizer.state.pop(parameter, None)  # it has had no gradient yet
    stored.load("optimizer", name_averages(optimizer, names))


def _flatten(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a tensor consists of: of a quantised one codes and scales, if sharded those of this process alone.

    Blocks of numbers with one scale do not end where another layout cuts, so that these cannot be put together again.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(local):
        yield "", tensor
        return
    of_process = f"{_OF_PROCESS}{dist.get_rank()} of {dist.get_world_size()}" if isinstance(tensor, DTensor) else ""
    names, _ = local.__tensor_flatten__()
    yield from ((f".{name}{of_process}", getattr(local, name)) for name in names)


def _create_averages(optimizer: torch.optim.Optimizer) -> None:
    """Make an update without gradients at the learning rate 0, for which the optimizer creates its own state."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0  # a number or a tensor, as it was
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def check_json(value: Mapping[str, Any], *, name: str) -> None:
    """Raise `InvalidInputError` unless JSON gives back an equal value."""
    try:
        again = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name} must consist of types that JSON has, got {value!r}: {error}") from error
    if again != value:
        raise InvalidInputError(
            f"{name} must not change in JSON (no tuples, only strings as keys): {value!r} comes back as {again!r}"
        )


def _is_interleaved(tensor: torch.Tensor) -> bool:
    """Whether this process's part is several regions of the tensor (transformers' packed projections under tensor
    parallelism), of which torch.distributed.checkpoint would write the first with the bytes of all.

    FSDP2's cut across one that tensor parallelism made before is one region.
    """
    if not isinstance(tensor, DTensor):
        return False
    mesh, placements = tensor.device_mesh, tensor.placements
    return any(
        isinstance(placement, _StridedShard)
        and placement.split_factor
        != math.prod(mesh.size(k) for k in range(number + 1, mesh.ndim) if placements[k].is_shard(placement.dim))
        for number, placement in enumerate(placements)
    )


def _is_of_another(name: str) -> bool:
    """Whether a tensor belongs to another one of as many processes alone."""
    _, _, process = name.partition(_OF_PROCESS)
    rank, _, num_processes = process.partition(" of ")
    return (
        bool(process)
        and dist.is_initialized()
        and int(num_processes) == dist.get_world_size()
        and int(rank) != dist.get_rank()
    )


def _has_same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Of tensors of one shape and type; equal numbers would not do: 0 and -0 are equal, and NaN is not."""
    own, others = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (tensor, other))
    return torch.equal(own, others)


def _describe(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


def _find_cause(error: CheckpointException | RuntimeError) -> BaseException:
    """Why the first of the processes that failed did."""
    return min(error.failures.items())[1][0] if isinstance(error, CheckpointException) else error


def _ignore_one_process() -> None:
    """Without torch's warning that one process saves or loads, in the threads that write too."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
