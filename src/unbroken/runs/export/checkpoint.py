"""Make a model's folder of any checkpoint: the model that was trained is loaded, and gets the checkpoint's weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from unbroken.errors import CheckpointError, InvalidInputError, missing_extra
from unbroken.runs.export.files import ModelInfo, add_files
from unbroken.runs.models import locate
from unbroken.training.checkpoints import find_checkpoints
from unbroken.training.model.adapters import causal_lm, checksum_of_frozen
from unbroken.training.model.pretrained import ModelForm, ModelOrigin, check_form, gather_form, write_pretrained
from unbroken.training.model.weights import checkpoint_parameters
from unbroken.training.policies import STATE as POLICIES
from unbroken.training.state import StoredState, TrainerState, read_state


def export_checkpoint(checkpoint: Path, folder: Path, *, form: ModelForm, source: str | None = None) -> Path:
    """Write the model of a checkpoint into `folder`, and return the checkpoint's own folder.

    `checkpoint` is a checkpoint's folder, or that of a run, whose newest one is taken. `source` is the folder or hub
    name of the model that was trained, where it was made in code or has moved.

    Raises:
        InvalidInputError: there is no checkpoint, `folder` holds files, the model is not found or is another one, or
            it cannot be written in this form.
        CheckpointError: the checkpoint is damaged.
        ExportError: the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"FOLDER must be new or empty, and {folder} holds files")
    checkpoint = find_checkpoint(checkpoint)
    model, state, origin = load_checkpoint(checkpoint, source=source)
    check_form(model, form)
    info = ModelInfo(
        step=int(state.processes[0]["extra"].get("num_steps", state.policy_version)),
        source=origin.source,
        merged=form.merged,
        dtype=None if form.dtype is None else str(form.dtype).removeprefix("torch."),
    )
    write_pretrained(folder, model, gather_form(model, form), form, add_files=partial(add_files, info=info))
    return checkpoint


def load_checkpoint(checkpoint: Path, *, source: str | None = None) -> tuple[Any, TrainerState, ModelOrigin]:
    """Load the model of a checkpoint, on the CPU; returns it with the checkpoint's numbers and where it is from.

    Raises:
        InvalidInputError: the model that was trained is not found, or is another one.
        CheckpointError: the checkpoint is damaged.
    """
    stored = read_state(checkpoint)
    origin = _find_origin(stored.state.model, source)
    return _load_model(origin, stored), stored.state, origin


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint in a folder, which is its own, a run's `checkpoints`, or the run's; the newest of several."""
    if (folder / "state.json").exists():
        return folder
    found = find_checkpoints(folder) or find_checkpoints(folder / "checkpoints")
    newest = found[max(found)] if found else folder
    if (newest / POLICIES).exists():
        names = sorted(path.parent.name for path in newest.glob("*/state.json"))
        raise InvalidInputError(f"CHECKPOINT must be that of one policy, and {newest} has {names}: {newest}/{names[0]}")
    if not found:
        raise InvalidInputError(f"CHECKPOINT must be a checkpoint's folder or that of a run with one, got {folder}")
    return newest


def _find_origin(origin: ModelOrigin, source: str | None) -> ModelOrigin:
    if source is not None:
        return replace(origin, source=locate(source))
    if not origin.source or (Path(origin.source).is_absolute() and not Path(origin.source).is_dir()):
        what = f"was at {origin.source}, and is not there" if origin.source else "was made in code"
        raise InvalidInputError(f"--model must be the folder or hub name of the model that was trained, which {what}")
    return origin


def _load_model(origin: ModelOrigin, stored: StoredState) -> Any:
    """Load the model that was trained, add its adapters, and copy the checkpoint's weights into it."""
    state, checkpoint = stored.state, stored.folder
    architecture = getattr(transformers, origin.architecture, None)
    if architecture is None:
        raise InvalidInputError(f"{checkpoint} is of a {origin.architecture}, which transformers does not have")
    try:
        model = architecture.from_pretrained(origin.source, dtype=getattr(torch, origin.dtype))
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"--model must be the folder or hub name of a {origin.architecture}, got {origin.source!r}: {error}"
        ) from None
    if origin.adapter is not None:
        model = _add_adapter(model, origin.adapter, checkpoint)
    elif state.frozen:
        raise InvalidInputError(f"{checkpoint} has several active adapters, which cannot be exported")
    trained = set(state.trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if state.frozen and state.frozen != (found := checksum_of_frozen(model)):
        raise CheckpointError(
            f"{checkpoint} is of a model whose frozen weights have the checksum {state.frozen!r}, and those of "
            f"{origin.source} have {found!r}: give the model that the run began with as --model"
        )
    stored.load("weights", checkpoint_parameters(model))
    causal = causal_lm(model)
    causal.config = type(causal.config).from_dict(dict(origin.config))
    return model


def _add_adapter(model: Any, name: str, checkpoint: Path) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"{checkpoint} has LoRA adapters, which need the lora extra", "lora") from error
    config = peft.PeftConfig.from_pretrained(checkpoint)
    config.base_model_name_or_path = model.name_or_path
    return peft.get_peft_model(model, config, adapter_name=name)
