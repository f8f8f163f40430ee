"""`trainer.numerics = "auto"`: exact where exact numerics were measured to cost next to nothing, fast otherwise.

A run chooses when it begins, says why in its first line, and writes the choice into `recipe.json` as if it had been
given: so the run continues, and is verified, with what it began with, on whatever machine. A script's run has no
`recipe.json`, and continues with what its checkpoint says. Nothing is chosen by trial: vLLM reads what makes it exact
once in a process, so a run that began exact could not go on fast in the same one. What was not measured is fast
instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from unbroken.errors import InvalidInputError
from unbroken.runs.config import EngineKind, RunConfig
from unbroken.runs.folder import read_trained_recipe
from unbroken.runs.settings import describe
from unbroken.types import Numerics

_ConfigT = TypeVar("_ConfigT", bound=RunConfig)
_MAX_COST = 1.05
"""Times the seconds of a step: what nobody sees. The goal for numerics that are exact without being asked for."""
_FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
"""Whose logprobs were seen to have the same bits on a GPU (`tests/support/hopper_numerics.py`)."""
_HEAD_SIZES = (64, 128, 256)
_OPTIONS = {
    "--dtype bfloat16",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
}
"""Of vLLM, with which something was measured. Many others are refused with exact numerics, and a run that names none
must not fail by them."""

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What exact numerics cost; docs/engines.md shows these rows."""

    engine: EngineKind
    machine: str
    trained: str
    least: float
    most: float
    """Parameters of a model, in billions."""
    cost: float
    """Of a step, in times that of fast numerics; of the embedded engine the least of training alone."""

    @property
    def chosen(self) -> Numerics:
        """What `auto` is there."""
        return Numerics.EXACT if self.cost <= _MAX_COST else Numerics.FAST


_CPU, _H200 = "a CPU", "an H200"
_MEASURED = (
    _Measured(engine=EngineKind.EMBEDDED, machine=_CPU, trained="all weights", least=0, most=math.inf, cost=1.18),
    _Measured(engine=EngineKind.COLOCATED, machine=_H200, trained="all weights", least=0.12, most=0.15, cost=1.04),
    _Measured(engine=EngineKind.COLOCATED, machine=_H200, trained="all weights", least=0.45, most=0.75, cost=1.04),
    _Measured(engine=EngineKind.COLOCATED, machine=_H200, trained="LoRA", least=3.5, most=4.5, cost=1.10),
    _Measured(engine=EngineKind.COLOCATED, machine=_H200, trained="LoRA", least=7, most=9, cost=1.21),
)


def choose_numerics(
    config: _ConfigT, *, continues: bool | None = None, model: str | Path | None = None
) -> tuple[_ConfigT, str]:
    """The config with the numerics of a run, and the line that says why it has these; "" if they were given.

    A run that has begun keeps what its folder says: with `continues` always (the first process has just written it),
    with None only if it has trained a step, and with False never. `model` is for configs that have no such setting.
    """
    if config.trainer.numerics is not Numerics.AUTO:
        return config, ""
    known = None if continues is False else _find_known(config, begins=bool(continues))
    # A checkpoint may not say them (None), nor a recipe.json that somebody wrote: then it is chosen as at a beginning.
    if known in (Numerics.FAST, Numerics.EXACT):
        chosen, why = Numerics(known), "as the run in this folder began"
    else:
        chosen, why = _choose(config, model)
    return _with_numerics(config, chosen), f"numerics: {chosen} ({why})"


def _find_known(config: RunConfig, *, begins: bool) -> Any:
    """The numerics of the run in a config's folder; None without a run, or if it does not say them.

    Raises:
        CheckpointError: its newest checkpoint is damaged.
    """
    if (stored := read_trained_recipe(config.output, begins=begins)) is not None:
        return stored.settings.get("trainer.numerics")
    if not (folder := config.output / "checkpoints").is_dir():
        return None
    from unbroken.training.checkpoints import find_checkpoints
    from unbroken.training.state import read_state

    if not (found := find_checkpoints(folder)):
        return None
    newest = found[max(found)]
    # Of several policies, each has its state in a folder of its own. Files are verified when the trainer loads them.
    own = newest if config.policies is None else newest / config.policies.names[0]
    return read_state(own, verifies_files=False).state.processes[0].get("numerics")


def _with_numerics(config: _ConfigT, numerics: Numerics) -> _ConfigT:
    return replace(config, trainer=replace(config.trainer, numerics=numerics))


def _choose(config: RunConfig, model: str | Path | None) -> tuple[Numerics, str]:
    try:  # the config's own rules know what exact numerics exclude: no second list of them here
        _with_numerics(config, Numerics.EXACT)
    except InvalidInputError as error:
        return Numerics.FAST, str(error).partition(", got exact")[0]
    kind = config.engine.kind
    if all(row.engine is not kind for row in _MEASURED):
        return Numerics.FAST, f"exact was not measured with engine.kind {kind}"
    machine = _find_machine()
    rows = [row for row in _MEASURED if (row.engine, row.machine) == (kind, machine)]
    if not rows:
        return Numerics.FAST, f"exact was not measured with engine.kind {kind} on {machine}"
    if all(row.chosen is Numerics.FAST for row in rows):  # whatever the model is: its config is not loaded for that
        return Numerics.FAST, _describe_cost(rows[0])
    return _choose_for_model(config, machine, model or describe(config).get("model"))


def _find_machine() -> str:
    import torch

    from unbroken.runs.processes import uses_cpu

    if uses_cpu():
        return _CPU
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this device"
    # Others of the generation have as many bits, but other costs, and a part of one (MIG) has kernels of its own.
    return _H200 if name == "NVIDIA H200" else name


def _find_options(config: RunConfig) -> Iterator[str]:
    """The options of vLLM that a run gives, as `--gpu-memory-utilization` or `-tp`; `--dtype` with its value."""
    words = config.engine.options
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        # As argparse: a number below 0 is a value (`--max-model-len -1`), and vLLM has no option that is one.
        if not word.startswith("-") or word == "-" or _NEGATIVE.fullmatch(word):
            continue
        name, separator, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if not separator and not following.startswith("-"):
            value = following
        yield f"{name} {value}" if name == "--dtype" and value else name


def _find_unmeasured_setting(config: RunConfig) -> str | None:
    """The first setting of a run with vLLM that no measured one had."""
    from unbroken.runs.processes import join_processes

    if (other := next((name for name in _find_options(config) if name not in _OPTIONS), None)) is not None:
        return f"engine.options {other}"
    if (number := join_processes().num_processes) > 1:
        return f"{number} processes"
    others = {
        "teacher.models": config.teacher is not None,
        "model_settings.kwargs": bool(config.model_settings.kwargs),
        "model_settings.attn_implementation": config.model_settings.attn_implementation is not None,
    }
    return next((name for name, is_given in others.items() if is_given), None)


def _choose_for_model(config: RunConfig, machine: str, model: Any) -> tuple[Numerics, str]:
    from unbroken.runs.models import load_config

    if not isinstance(model, str | Path):
        return Numerics.FAST, "the recipe names no model before it runs"
    loaded = load_config(model, config.model_settings)
    if loaded is None:
        return Numerics.FAST, f"{model} has no config that can be read"
    if (why := _find_unmeasured_setting(config) or _find_unmeasured(loaded)) is not None:
        return Numerics.FAST, f"exact was not measured with {why}"
    return _decide(config.engine.kind, machine, has_lora=config.lora is not None, billions=_count_weights(loaded) / 1e9)


def _count_weights(model_config: Any) -> int:
    """The parameters of a model of a measured family, but for norms and biases: below a thousandth of them."""
    from unbroken.decoder_config import DecoderConfig

    decoder, sizes = DecoderConfig(model_config), model_config.get_text_config()
    attention = 2 * (decoder.num_heads + decoder.num_key_heads) * decoder.head_size
    of_layer = attention + 3 * sizes.intermediate_size
    embeddings = sizes.vocab_size * (1 if decoder.is_tied else 2)
    return int(sizes.hidden_size * (embeddings + sizes.num_hidden_layers * of_layer))


def _find_unmeasured(model_config: Any) -> str | None:
    """What of a model was not seen to have the same bits; None if all of it was."""
    from unbroken.decoder_config import DecoderConfig

    decoder, family = DecoderConfig(model_config), model_config.model_type
    rope = (decoder.get("rope_parameters") or {}).get("rope_type")
    found = {
        f"the family {family}, only with {', '.join(_FAMILIES)}": family not in _FAMILIES,
        "sliding windows": decoder.window is not None or bool(decoder.layer_kinds - {"full_attention"}),
        f"heads of {decoder.head_size}, only with {', '.join(map(str, _HEAD_SIZES))}": (
            decoder.head_size not in _HEAD_SIZES
        ),
        f"rotary factors of type {rope}": rope not in (None, "default"),
        "quantised weights": decoder.is_quantized,
    }
    return next((name for name, is_other in found.items() if is_other), None)


def _describe_cost(row: _Measured) -> str:
    if row.most == math.inf:  # the row has the least of all models, which few of them have
        return f"exact is slower on {row.machine}"
    return f"exact takes {row.cost:.2f} times as long on {row.machine}"


def _decide(engine: EngineKind, machine: str, *, has_lora: bool, billions: float) -> tuple[Numerics, str]:
    """What the table says of a model of a measured family."""
    trained = "LoRA" if has_lora else "all weights"
    for row in _MEASURED:
        found = (row.engine, row.machine, row.trained) == (engine, machine, trained)
        if found and row.least <= billions <= row.most:
            return row.chosen, _describe_cost(row)
    return Numerics.FAST, f"exact was not measured with {trained} of {billions:.2f}B parameters on {machine}"
