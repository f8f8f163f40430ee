"""A recipe from its file: a Python file, or a TOML file with the values of one.

A Python recipe is a file with two names, read top to bottom:

    class Config(RunConfig):                    # frozen dataclass: what can be set, with defaults
    async def run(config: Config) -> None:      # the run

A TOML recipe holds values for a Python recipe's Config: of the file that its key `recipe` names, or of
`unbroken.runs.prompts`, which trains on a data set of prompts with reward functions from a file.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.runs.config import RunConfig
from unbroken.runs.sections import Section, section_of
from unbroken.runs.settings import build, load_toml, read_options, read_table

BUILT_IN = "unbroken.runs.prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Something that can be run."""

    name: str
    """Of its file."""
    doc: str
    """What it says of itself."""
    section: Section
    """Of its Config."""
    run: Callable[[Any], Coroutine[Any, Any, None]]
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values that its file gives, by dotted names."""

    def configure(self, words: Sequence[str]) -> RunConfig:
        """The config of a run: the command line's values, the file's where it says nothing, and the defaults.

        Raises:
            InvalidInputError: a value is missing or refused.
        """
        config: RunConfig = build(self.section, {**self.given, **read_options(words, self.section)})
        return config


def load_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        InvalidInputError: there is none, or it lacks a part.
    """
    if not path.is_file():
        raise InvalidInputError(f"RECIPE must be a Python or TOML file, and there is no file {path}")
    match path.suffix:
        case ".py":
            return _recipe_of(load_module(path), path)
        case ".toml":
            table = load_toml(path)
            base = table.pop("recipe", None)
            module = importlib.import_module(BUILT_IN) if base is None else load_module(path.parent / base)
            recipe = _recipe_of(module, path)
            given = read_table(table, recipe.section, source=f"{path}: ", folder=path.parent)
            return dataclasses.replace(recipe, given=given)
        case _:
            raise InvalidInputError(f"RECIPE must be a Python or TOML file (.py, .toml), got {path}")


def load_module(path: Path) -> ModuleType:
    """A Python file as a module of its own; one that did not change is run once, however often it is asked for.

    Raises:
        InvalidInputError: there is no such file, or it cannot be run.
    """
    if not path.is_file():
        raise InvalidInputError(f"{path} must be a Python file, and there is none")
    name = f"unbroken_file:{path.resolve()}@{path.stat().st_mtime_ns}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"{path} must be a Python file, named with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InvalidInputError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _recipe_of(module: ModuleType, path: Path) -> Recipe:
    kind, run = getattr(module, "Config", None), getattr(module, "run", None)
    if not (isinstance(kind, type) and issubclass(kind, RunConfig) and dataclasses.is_dataclass(kind)):
        raise InvalidInputError(f"{path} must define Config, a frozen dataclass that extends RunConfig, got {kind!r}")
    if not inspect.iscoroutinefunction(run):
        raise InvalidInputError(f"{path} must define `async def run(config: Config) -> None`, got {run!r}")
    return Recipe(name=path.name, doc=inspect.cleandoc(module.__doc__ or ""), section=section_of(kind), run=run)
