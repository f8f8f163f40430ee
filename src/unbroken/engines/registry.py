"""The engines that `unbroken serve --engine NAME` starts.

A new engine is a module with `async def open_engine(options: EngineOptions) -> Engine`, and its line in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, cast

from unbroken.errors import missing_extra

if TYPE_CHECKING:
    from unbroken.engines.base import Engine
    from unbroken.images.decoder import ImageLimits
    from unbroken.images.processor import ImageProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModule:
    """Where an engine is, and what must be installed for it."""

    module: str
    needs: str
    extra: str
    """The extra of this package that installs it."""
    options: str = ""
    """A module that loads no torch and has `parse_words(words)`, which ends the command for an option that the engine
    does not know; empty if only the engine can read its options."""


ENGINES = {
    "vllm": EngineModule(module="unbroken.engines.vllm.engine", needs="vLLM", extra="vllm"),
    "transformers": EngineModule(
        module="unbroken.engines.transformers.engine",
        needs="torch",
        extra="train",
        options="unbroken.engines.transformers.config",
    ),
}
"""By name; `auto` is the first that is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a command gives an engine when it opens it."""

    model: str
    """Folder or hub name of the model."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; None is the model's."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of LoRA adapters."""
    words: tuple[str, ...] = ()
    """The options of the command line that the engine reads itself."""
    decode: Callable[[list[int]], str]
    """Turns completion ids into the text in which stop strings are searched."""
    image_processor: ImageProcessor | None = None
    """None for a model that takes text only."""
    image_limits: ImageLimits
    max_top_logprobs: int
    """How many of the most likely ids a request may ask for."""


def check_words(name: str, words: Sequence[str]) -> None:
    """End the command for an option that the engine does not know, if that can be said before a model is loaded."""
    if name == "auto":
        name = "transformers" if find_spec("vllm") is None else "vllm"
    if words and (module := ENGINES[name].options):
        import_module(module).parse_words(words)


async def open_engine(name: str, options: EngineOptions) -> Engine:
    """Open the engine with this name, or the first that is installed if it is `auto`.

    Raises:
        InvalidInputError: what it needs is not installed, or it refuses the model or an option.
    """
    module = _import_first() if name == "auto" else _import(name)
    return cast("Engine", await module.open_engine(options))


def _import_first() -> ModuleType:
    *names, last = ENGINES
    for name in names:
        try:
            return import_module(ENGINES[name].module)
        except ImportError:
            continue
    return _import(last)


def _import(name: str) -> ModuleType:
    entry = ENGINES[name]
    try:
        return import_module(entry.module)
    except ImportError as error:
        raise missing_extra(error, f"--engine {name} needs {entry.needs}", entry.extra) from error
