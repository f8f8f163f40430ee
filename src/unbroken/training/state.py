"""A trainer's state in a folder that is written whole or not at all, and verified before it is loaded.

    weights/version-00000007/      the model's parameters by name; of a model with adapters only those that are trained
    optimizer/version-00000007/    AdamW's averages of each trained parameter: "0.exp_avg", "0.step", ...
    reference/version-00000007/    the reference's parameters, if they change (`ReferenceSync`)
    state.json                     counts, and the origin of the model; of each process, generator and `extra`
    adapter_config.json            of a model with adapters, as PEFT writes it

JSON keeps Python's integers and floats exactly, and safetensors keeps the bits of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unbroken.errors import CheckpointError, InvalidInputError, WeightsError
from unbroken.training.model.pretrained import ModelOrigin
from unbroken.training.model.sharding import shard_like
from unbroken.weights.files import WeightFiles, find_versions, read_manifest, write_weights
from unbroken.weights.folders import atomic_folder, flush_to_disk

ADAPTER_CONFIG = "adapter_config.json"
_STATE = "state.json"
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The numbers of a checkpoint, and the files of its tensors."""

    policy_version: int
    num_updates: int
    processes: tuple[Mapping[str, Any], ...]
    """For each process, its generator's state as `rng` and the caller's `extra`."""
    weights: WeightFiles
    optimizer: WeightFiles
    reference: WeightFiles | None = None
    frozen: str = ""
    """A checksum of the weights that are not saved because they are not trained; empty if all are saved."""
    trained: tuple[str, ...] | None = None
    """Names of the trained parameters, in the optimizer's order; None in checkpoints that do not have them."""
    model: ModelOrigin | None = None
    """None in checkpoints that do not have it."""


def write_state(
    folder: Path,
    *,
    weights: Iterable[tuple[str, torch.Tensor]],
    averages: Iterable[tuple[str, torch.Tensor]],
    reference: Iterable[tuple[str, torch.Tensor]] | None = None,
    policy_version: int,
    num_updates: int,
    processes: Sequence[Mapping[str, Any]],
    frozen: str = "",
    trained: Sequence[str] = (),
    model: ModelOrigin | None = None,
    adapter_config: Any = None,
) -> None:
    """Write a checkpoint, flushed to disk; `CheckpointError` if that fails, and nothing is left of it."""
    try:
        with atomic_folder(folder) as aside:
            tensors = {"weights": weights, "optimizer": averages, "reference": reference}
            parts = {
                name: write_weights(aside / name, part, policy_version=policy_version)
                for name, part in tensors.items()
                if part is not None
            }
            state = {
                "format": _FORMAT_VERSION,
                "policy_version": policy_version,
                "num_updates": num_updates,
                "processes": list(processes),
                "frozen": frozen,
                "trained": list(trained),
                "model": None if model is None else asdict(model),
                "digests": {name: files.digest for name, files in parts.items()},
            }
            (aside / _STATE).write_text(json.dumps(state, indent=1, allow_nan=False), "utf-8")
            if adapter_config is not None:
                adapter_config.save_pretrained(aside)
                flush_to_disk(aside / ADAPTER_CONFIG)
            flush_to_disk(aside / _STATE)
    except (OSError, WeightsError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: {error.__cause__ or error}. Nothing is left of it, and earlier "
            "ones are unchanged; free space, or give another folder"
        ) from error


def read_state(folder: Path) -> TrainerState:
    """Read a checkpoint and verify all of its files; `CheckpointError` if it is incomplete or damaged."""
    try:
        state = json.loads((folder / _STATE).read_text("utf-8"))
        if state["format"] != _FORMAT_VERSION:
            raise InvalidInputError(f"format must be {_FORMAT_VERSION}, got {state['format']!r}")
        parts = {name: _read_part(folder / name, digest) for name, digest in state["digests"].items()}
        return TrainerState(
            policy_version=int(state["policy_version"]),
            num_updates=int(state["num_updates"]),
            processes=tuple(state["processes"]),
            weights=parts["weights"],
            optimizer=parts["optimizer"],
            reference=parts.get("reference"),
            frozen=str(state.get("frozen", "")),
            trained=tuple(state["trained"]) if "trained" in state else None,
            model=ModelOrigin(**state["model"]) if state.get("model") else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, WeightsError) as error:
        raise CheckpointError(
            f"{folder} must hold a whole checkpoint: {type(error).__name__}: {error}. Remove the folder to go on from "
            "an earlier one"
        ) from error


def check_trained(names: Sequence[str], state: TrainerState) -> None:
    """Raise `CheckpointError` unless the trained parameters, by name and in this order, are those of the checkpoint."""
    if state.trained is None or tuple(names) == state.trained:
        return
    changed = sorted(set(names) ^ set(state.trained)) or ["their order"]
    raise CheckpointError(
        f"{state.optimizer.folder} must hold averages of the trained parameters: {changed[0]} differs, of {len(names)} "
        f"here and {len(state.trained)} there. The same parameters must have requires_grad as in the run before"
    )


@torch.no_grad()
def load_parameters(parameters: Mapping[str, torch.Tensor], files: WeightFiles) -> None:
    """Copy the files' weights into the parameters, or into this process's parts of them.

    Raises:
        CheckpointError: names, shapes or dtypes differ; nothing was copied.
    """
    ours = {name: _describe(parameter) for name, parameter in parameters.items()}
    theirs = {name: _describe(tensor) for name, tensor in files.tensors()}
    if ours != theirs:
        name = next(name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))
        raise CheckpointError(
            f"{files.folder} must hold the weights of this model: {name} is {ours.get(name)} in the "
            f"model and {theirs.get(name)} in the checkpoint"
        )
    for name, tensor in files.tensors():
        parameters[name].copy_(shard_like(tensor, parameters[name]))


def load_averages(optimizer: torch.optim.Optimizer, files: WeightFiles) -> None:
    """Load the optimizer's state from the files; its learning rate and other settings stay.

    Raises:
        CheckpointError: the files are of other trained parameters; the optimizer is unchanged.
    """
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in files.tensors():
        index, _, key = name.partition(".")
        parameter = parameters.get(int(index))
        if parameter is None or (key != "step" and tensor.shape != parameter.shape):
            raise CheckpointError(
                f"{files.folder} must hold averages of the trained parameters: {name} is {tuple(tensor.shape)}, and "
                f"parameter {index} {'is missing' if parameter is None else f'is {tuple(parameter.shape)}'}. The same "
                "parameters must have requires_grad as in the run before"
            )
        state.setdefault(int(index), {})[key] = tensor if key == "step" else shard_like(tensor, parameter)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


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


def _read_part(parent: Path, digest: str) -> WeightFiles:
    (folder,) = find_versions(parent).values()
    files = read_manifest(folder)
    files.verify()
    if files.digest != digest:
        raise CheckpointError(f"{folder} holds other tensors than those that {_STATE} was written with")
    return files


def _describe(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)
