"""A model in a folder, as transformers, PEFT and vLLM load it; and what a checkpoint must know to become one.

    config.json  generation_config.json  model.safetensors    the whole model; large ones in shards, with an index
    adapter_config.json  adapter_model.safetensors            adapters alone

Weights are gathered, named as in the model's own files and written layer by layer, so that one file's are held at most.
Adapters alone are written by PEFT.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from unbroken.errors import ExportError, InvalidInputError
from unbroken.training.model.adapters import ADAPTER_NAMES, causal_lm, is_adapted, strip_wrappers
from unbroken.training.model.sharding import gather_tensor
from unbroken.training.model.weights import checkpoint_parameters, gather_weights
from unbroken.untrusted import MAX_FACTS_BYTES, read_json_file
from unbroken.weights.folders import atomic_folder, flush_to_disk

AddFiles: TypeAlias = Callable[[Path], None]
"""Writes more files, such as the tokenizer's, into the folder."""
_CONFIG, _GENERATION_CONFIG, _CARD = "config.json", "generation_config.json", "README.md"
_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
_LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """How a model is written."""

    merged: bool = False
    """Write a model with adapters as a whole model, with the adapters merged; otherwise the adapters alone."""
    dtype: torch.dtype | None = None
    """The type of the weights; None: that of the files, for a whole model; for adapters alone that in which
    they are trained."""
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
    config: Mapping[str, Any]
    """The model's config as it was trained, which may differ from its source's."""

    @staticmethod
    def of(model: Any) -> ModelOrigin:
        """Describe a model, with or without adapters."""
        causal = causal_lm(model)
        source = str(causal.config.name_or_path or "")
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
    if form.merged and not is_adapted(model):
        raise InvalidInputError(f"merged must be False for a {type(model).__name__}, which has no adapters")
    if is_adapted(model) and not form.merged:
        _check_adapter_is_whole(model)


def _check_adapter_is_whole(model: Any) -> None:
    """Refuse to write the adapter alone where it is not all that is trained."""
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
        return _gather_checkpoint(model)
    return chain(gather_weights(model), _gather_buffers(model))


def _stored_dtype(model: Any) -> torch.dtype | None:
    """The type of the weights in the model's own files; None for a model that was made in code."""
    try:
        config = AutoConfig.from_pretrained(causal_lm(model).name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return None
    dtype: torch.dtype | None = config.dtype or config.get_text_config().dtype
    return dtype


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
        with atomic_folder(folder) as aside:
            if is_adapted(model) and not form.merged:
                _write_adapter(aside, model, {name: _to_cpu(tensor, form.dtype) for name, tensor in weights})
            else:
                _write_whole(aside, causal_lm(model), weights, form)
            if add_files is not None:
                add_files(aside)
            for path in aside.rglob("*"):
                flush_to_disk(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"the model cannot be written to {folder}: {error}. Nothing is left of it; free space, or give another "
            "folder"
        ) from error


def _write_whole(folder: Path, model: Any, weights: Iterable[tuple[str, torch.Tensor]], form: ModelForm) -> None:
    dtype = form.dtype or _stored_dtype(model)
    _write_config(folder, model, dtype)
    # transformers loads the many configs that set a temperature without `do_sample`, and refuses to save them.
    # Only models that can generate have one.
    (getattr(model, "generation_config", None) or GenerationConfig()).to_json_file(folder / _GENERATION_CONFIG)
    named = _name_as_stored(model, weights, dtype, keeps=form.dtype is None)
    files: list[list[str]] = []
    size = 0
    for held in _fill_files(named, form.max_shard_bytes):
        save_file(held, folder / str(len(files)), metadata={"format": "pt"})
        files.append(list(held))
        size += sum(tensor.nbytes for tensor in held.values())
        held.clear()  # before the next ones are gathered
    if len(files) == 1:
        (folder / "0").rename(folder / "model.safetensors")
    else:
        _name_shards(folder, files, size)


def _write_config(folder: Path, model: Any, dtype: torch.dtype | None) -> None:
    named_dtype = str(dtype or model.dtype).removeprefix("torch.")
    config = json.loads(model.config.to_json_string())
    config = (config if dtype is None else _with_dtype(config, named_dtype)) | {"dtype": named_dtype}
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _name_shards(folder: Path, files: Sequence[Sequence[str]], size: int) -> None:
    """Name several files by their number, which is known now, and write which one has each weight."""
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for number, name in enumerate(names):
        (folder / str(number)).rename(folder / name)
    weight_map = {weight: name for name, held in zip(names, files, strict=True) for weight in held}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _list_exact_parts(model: Any, dtype: torch.dtype | None) -> set[str]:
    """Parts of names of weights that transformers loads in float32; some of them only where others are float16, whose
    range is too small for them.
    """
    parts = {*(model._keep_in_fp32_modules_strict or ())}
    return parts | {*(model._keep_in_fp32_modules or ())} if dtype is torch.float16 else parts


def _find_layer(named: tuple[str, torch.Tensor]) -> str:
    """The beginning of a weight's name that is its layer's; empty outside of layers."""
    match = _LAYER.match(named[0])
    return "" if match is None else match[0]


def _name_as_stored(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, *, keeps: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights on the CPU as in the model's own files, such as a layer's experts one by one; a layer is held at a time.

    `keeps` leaves buffers and what transformers loads in float32 in their type.
    """
    buffers = {name for name, _ in _gather_buffers(model)}
    exact = _list_exact_parts(model, dtype)
    ignored = set(model._keys_to_ignore_on_save or ())

    def choose_dtype(name: str) -> torch.dtype | None:
        in_own = keeps and (name in buffers or any(f".{part}." in f".{name}" for part in exact))
        return None if in_own else dtype

    for _, layer in groupby(weights, _find_layer):
        state = {name: _to_cpu(tensor, choose_dtype(name)) for name, tensor in layer if name not in ignored}
        yield from revert_weight_conversion(model, state).items()


def _fill_files(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of one file after the other."""
    held: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > max_bytes:
            yield held
            held, size = {}, 0
        is_own = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        held[name] = tensor if is_own else tensor.clone(memory_format=torch.contiguous_format)  # for safetensors
        size += tensor.nbytes
    yield held


def _write_adapter(folder: Path, model: Any, state: Mapping[str, torch.Tensor]) -> None:
    (name,) = model.active_adapters
    # By default PEFT asks the hub whether the vocabulary has grown, and then writes all embeddings.
    model.save_pretrained(folder, selected_adapters=[name], state_dict=dict(state), save_embedding_layers=False)
    (folder / _CARD).unlink(missing_ok=True)  # a form to be filled in
    named = folder / name
    if named.is_dir():  # PEFT writes the adapter "default" into the folder itself, and each other one into its own
        for path in named.iterdir():
            path.rename(folder / path.name)
        named.rmdir()
    _sort_sets(folder / ADAPTER_CONFIG, model.peft_config[name])


def write_adapter_config(folder: Path, config: Any) -> None:
    """Write a config of PEFT into a folder, with the same bytes in every process."""
    config.save_pretrained(folder)
    _sort_sets(folder / ADAPTER_CONFIG, config)


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """What of an adapter's config can be compared: without the place of its base, and with its lists sorted, because
    PEFT writes sets in any order. None without one.

    Raises:
        InvalidInputError: it is no JSON object.
    """
    if not (folder / ADAPTER_CONFIG).exists():
        return None
    try:
        config = dict(read_json_file(folder / ADAPTER_CONFIG, max_bytes=MAX_FACTS_BYTES))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(f"{folder / ADAPTER_CONFIG} must be a JSON object: {error}") from error
    config.pop("base_model_name_or_path", None)
    return {name: sorted(value, key=str) if isinstance(value, list) else value for name, value in config.items()}


def _sort_sets(path: Path, config: Any) -> None:
    """Write what is a set in `config` as a sorted list: PEFT's `list(set)` has another order in another process
    (PYTHONHASHSEED).
    """
    written = json.loads(path.read_text("utf-8"))
    ordered = {
        name: sorted(value) if isinstance(vars(config).get(name), set) else value for name, value in written.items()
    }
    path.write_text(json.dumps(ordered, indent=2, sort_keys=True), "utf-8")


def _with_dtype(config: Any, dtype: str) -> Any:
    """The config of a model, and those of its parts in it, with another type of the weights."""
    if not isinstance(config, dict):
        return config
    return {key: dtype if key == "dtype" else _with_dtype(value, dtype) for key, value in config.items()}


def _to_cpu(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)


def _gather_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's files, such as a router's biases; training does not change them."""
    for prefix, module in causal_lm(model).named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield strip_wrappers(name), buffer.detach()


def _gather_checkpoint(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of `checkpoint_parameters`; if sharded, every process must gather all."""
    named = checkpoint_parameters(model).items()
    return ((name, gather_tensor(tensor)) for name, tensor in named)
