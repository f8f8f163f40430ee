"""The model of a run: what is trained, what it is held close to, and how messages become its ids."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from unbroken.errors import InvalidInputError
from unbroken.integrations.renderers.loading import load_renderer
from unbroken.runs.config import LoraConfig, RendererConfig, RunConfig
from unbroken.rendering.base import Renderer
from unbroken.training.config import Reference


def load_policy(source: str | Path) -> Any:
    """A model in float32, as the trainer takes it.

    Raises:
        InvalidInputError: there is none.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"model must be a folder or the hub's name of a model, got {str(source)!r}: {error}"
        ) from None


def load_chat(source: str | Path, config: RendererConfig) -> Renderer:
    """The renderer of a model.

    Raises:
        TemplateError: the model has no chat template, or one that does not compile.
    """
    return load_renderer(
        source,
        renderer=config.name,
        template_kwargs=config.template_kwargs,
        history=config.history,
        parser=config.parser,
    )


def prepared(model: Any, config: RunConfig) -> tuple[Any, Any]:
    """The model as the trainer takes it, and what it is held close to, None if that is nothing.

    With adapters, which the model itself gets, this is the base below them; else a copy.

    Raises:
        InvalidInputError: peft is missing, or the model has none of the modules to adapt.
    """
    if config.lora is None:
        return model, copy.deepcopy(model) if config.loss.has_reference else None
    return _with_adapters(model, config.lora, config.seed), Reference.BASE if config.loss.has_reference else None


def _with_adapters(model: Any, config: LoraConfig, seed: int) -> Any:
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
        raise InvalidInputError(f"lora.modules must be of the model, got {list(config.modules)}: {error}") from None
