"""A model in a folder, as transformers, PEFT and vLLM load it; and what a checkpoint must know to become one.

    config.json  generation_config.json  model.safetensors    the whole model; large ones in shards, with an index
    adapter_config.json  adapter_model.safetensors            adapters alone

The files are written by `save_pretrained` of transformers and PEFT, from gathered weights under the model's own names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging

from unbroken.errors import ExportError, InvalidInputError
from unbroken.training.model.adapters import ADAPTER_NAMES, causal_lm, is_adapted
from unbroken.training.model.weights import gather_buffers, gather_checkpoint, gather_weights
from unbroken.weights.folders import atomic_folder, flush_to_disk

AddFiles: TypeAlias = Callable[[Path], None]
"""Writes more files, such as the tokenizer's, into the folder."""
_CONFIG, _GENERATION_CONFIG, _CARD = "config.json", "generation_config.json", "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """How a model is written."""

    merged: bool = False
    """Write a model with adapters as a whole model, with the adapters merged; otherwise the adapters alone."""
    dtype: torch.dtype | None = None
    """The type of the weights; None: that in which they are trained."""
    max_shard_bytes: int = 5 * 10**9
    """Maximum bytes of a safetensors file, unless one tensor is larger."""

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise InvalidInputError(f"max_shard_bytes must be >= 1, got {self.max_shard_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """Where a model came from, so that a checkpoint can be exported without the code that trained it."""

    source: str
    """Folder (absolute) or hub name; empty for a model that was made in code."""
    architecture: str
    """The class in transformers."""
    dtype: str
    """The model's type, such as float32."""
    adapter: str | None
    """The name of the one active adapter; None without adapters, or with several."""
    config: Mapping[str, Any] | None = None
    """The model's config as it was trained, which may differ from its source's; None in older checkpoints."""

    @staticmethod
    def of(model: Any) -> ModelOrigin:
        """Describe a model, with or without adapters."""
        causal = causal_lm(model)
        source = str(getattr(causal.config, "_name_or_path", None) or "")
        active = list(model.active_adapters) if is_adapted(model) else []
        return ModelOrigin(
            source=str(Path(source).absolute()) if source and Path(source).is_dir() else source,
            architecture=type(causal).__name__.removeprefix("FSDP"),
            dtype=str(causal.dtype).removeprefix("torch."),
            adapter=active[0] if len(active) == 1 else None,
            config=json.loads(causal.config.to_json_string()),
        )


def check_form(model: Any, form: ModelForm) -> None:
    """Check that a model can be written in this form.

    Raises:
        InvalidInputError: `merged` without adapters, or adapters alone would not be the whole of what is trained.
    """
    if not is_adapted(model):
        if form.merged:
            raise InvalidInputError(f"merged must be False for a {type(model).__name__}, which has no adapters")
        return
    if form.merged:
        return
    if len(model.active_adapters) != 1:
        raise InvalidInputError(
            f"a model must have one active adapter to be written as an adapter, got {list(model.active_adapters)}: "
            "write it merged"
        )
    may_be_bias = model.peft_config[model.active_adapters[0]].bias != "none"
    for name, parameter in model.named_parameters():
        is_kept = any(part in name for part in ADAPTER_NAMES) or (may_be_bias and name.endswith("bias"))
        if parameter.requires_grad and not is_kept:
            raise InvalidInputError(
                f"{name} must not be trained if adapters alone are written, because they do not hold it: write the "
                "model merged"
            )


def gather_form(model: Any, form: ModelForm) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors of the form; if sharded, every process must gather all."""
    if is_adapted(model) and not form.merged:
        return gather_checkpoint(model)
    return chain(gather_weights(model), gather_buffers(model))


def write_pretrained(
    folder: Path,
    model: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    form: ModelForm,
    *,
    add_files: AddFiles | None = None,
) -> None:
    """Write the weights of `gather_form` into `folder`, which is there whole or not at all; an earlier one is replaced.

    Raises:
        ExportError: it cannot be written; nothing is left of it.
    """
    try:
        with atomic_folder(folder) as aside, _no_progress_bars():
            state = {name: _to_cpu(tensor, form.dtype) for name, tensor in weights}
            if is_adapted(model) and not form.merged:
                _write_adapter(aside, model, state)
            else:
                _write_whole(aside, causal_lm(model), state, form)
            if add_files is not None:
                add_files(aside)
            for path in aside.rglob("*"):
                flush_to_disk(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"the model cannot be written to {folder}: {error}. Nothing is left of it; free space, or give another "
            "folder"
        ) from error


def _write_whole(folder: Path, model: Any, state: Mapping[str, torch.Tensor], form: ModelForm) -> None:
    with _valid_generation_config(model) as own:
        model.save_pretrained(folder, state_dict=dict(state), max_shard_size=form.max_shard_bytes)
        if own is not None:
            own.to_json_file(folder / _GENERATION_CONFIG)
    if form.dtype is not None:
        path = folder / _CONFIG
        config = _with_dtype(json.loads(path.read_text("utf-8")), str(form.dtype).removeprefix("torch."))
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _write_adapter(folder: Path, model: Any, state: Mapping[str, torch.Tensor]) -> None:
    (name,) = model.active_adapters
    # By default PEFT asks the hub whether the vocabulary has grown, and then writes all embeddings.
    model.save_pretrained(folder, selected_adapters=[name], state_dict=dict(state), save_embedding_layers=False)
    (folder / _CARD).unlink(missing_ok=True)  # a form to be filled in
    named = folder / name
    if named.is_dir():  # PEFT writes the adapter "default" into the folder itself, and others into one of their own
        for path in named.iterdir():
            path.rename(folder / path.name)
        named.rmdir()


@contextmanager
def _valid_generation_config(model: Any) -> Iterator[Any]:
    """Yield the model's own generation config, if any, while it has one that transformers agrees to save.

    transformers loads the many that set a temperature without `do_sample`, and refuses to save them.
    """
    own = getattr(model, "generation_config", None)
    model.generation_config = GenerationConfig()
    try:
        yield own
    finally:
        model.generation_config = own


def _with_dtype(config: Any, dtype: str) -> Any:
    """The config of a model, and those of its parts in it, with another type of the weights."""
    if not isinstance(config, dict):
        return config
    return {key: dtype if key == "dtype" else _with_dtype(value, dtype) for key, value in config.items()}


def _to_cpu(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without transformers' own bars, which would break the run's display."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
