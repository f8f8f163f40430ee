"""The model of a run, its reference model, and its renderer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from unbroken.errors import InvalidInputError
from unbroken.integrations.renderers.loading import load_renderer
from unbroken.rendering.base import Renderer
from unbroken.runs.config import LoraConfig, RendererConfig, RunConfig
from unbroken.training.config import Reference


def load_model(source: str | Path) -> Any:
    """Load a model in float32, as the trainer needs it; raises `InvalidInputError` if there is no such model."""
    try:
        return AutoModelForCausalLM.from_pretrained(locate(source), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"model must be a folder or the hub's name of a model, got {str(source)!r}: {error}"
        ) from None


def locate(source: str | Path) -> str:
    """The absolute path of a model's folder, or its name on the hub: what others can find it by."""
    return str(Path(source).absolute()) if Path(source).is_dir() else str(source)


def load_model_renderer(source: str | Path, config: RendererConfig) -> Renderer:
    """Load the renderer of a model; raises `TemplateError` if its chat template is missing or does not compile."""
    return load_renderer(
        source,
        renderer=config.name,
        template_kwargs=config.template_kwargs,
        history=config.history,
        parser=config.parser,
    )


def prepare_model(model: Any, config: RunConfig) -> tuple[Any, Any]:
    """Return the model to train and its reference, or None if the loss needs no reference.

    With LoRA, the adapters are added to `model` itself and the reference is the base below them; without it, the
    reference is a copy.

    Raises:
        InvalidInputError: peft is not installed, or the model has none of the modules to adapt.
    """
    needs_reference = config.objective.needs_reference(config.trainer)
    if config.lora is None:
        return model, copy.deepcopy(model) if needs_reference else None
    return _add_adapters(model, config.lora, config.seed), Reference.BASE if needs_reference else None


def _add_adapters(model: Any, config: LoraConfig, seed: int) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"lora needs the lora extra: pip install 'unbroken[lora]' ({error})") from None
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.modules) or "all-linear",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        names = list(config.modules)
        raise InvalidInputError(f"lora.modules must be modules of the model, got {names}: {error}") from None
