"""Recipes: load one from its file; `runs.training` runs it.

A Python recipe is a file with two names, read from top to bottom:

    class Config(RunConfig):                          # a frozen dataclass: the settings, with defaults
    async def make_task(config: Config) -> Task:      # the model, and the problems to train and to evaluate on

A TOML recipe holds values for the Config of a Python recipe: the one that its key `recipe` names, or the built-in
`unbroken.runs.prompts`, which trains on a data set of prompts with reward functions from a file.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.runs.collector import EvaluationSet, MakeCurriculum, Problems
from unbroken.runs.config import RunConfig
from unbroken.runs.python_files import FunctionName, load_module
from unbroken.runs.settings import Mistakes, Section, build, load_toml, read_options, read_table, section_of

BUILT_IN = "unbroken.runs.prompts.built_in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train, and on what. `unbroken eval` evaluates it, and a sampler samples its problems for a trainer."""

    model: str | Path
    """A folder, or a name on the hub."""
    train_on: Problems
    evaluate_on: Problems | Sequence[EvaluationSet]
    curriculum: MakeCurriculum | None = None
    """Chooses the problems, instead of `RunConfig.curriculum`."""

    @property
    def curriculum_name(self) -> str:
        """The curriculum of the code, by its file or module and its name there: `task.py:EasyFirst`; empty without."""
        made = self.curriculum.func if isinstance(self.curriculum, partial) else self.curriculum
        if made is None:
            return ""
        named = made if inspect.isroutine(made) or inspect.isclass(made) else type(made)
        path, _, _ = named.__module__.removeprefix("unbroken_file:").rpartition("@")  # of `load_module`
        return f"{Path(path).name or named.__module__}:{named.__qualname__}"

    @property
    def sets(self) -> Sequence[EvaluationSet]:
        """What is evaluated."""
        given = self.evaluate_on
        return [EvaluationSet(problems=given)] if isinstance(given, Problems) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe that was loaded from a file."""

    name: str
    """The file's name."""
    doc: str
    """The docstring of the Python file."""
    section: Section
    make: Callable[[Any], Coroutine[Any, Any, Task]]
    """The file's own `make_task`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values from the TOML file, by dotted names."""
    code: str = ""
    """The Python file, if it is the user's own."""

    async def make_task(self, config: RunConfig) -> Task:
        """Make the task of a config; raises `InvalidInputError` if the file's function returns something else."""
        made = await self.make(config)
        if not isinstance(made, Task):
            raise InvalidInputError(f"make_task of {self.name} must return a Task (unbroken.runs.recipe), got {made!r}")
        return made

    def configure(self, options: Sequence[str]) -> RunConfig:
        """Build the config; options override file values. Raises `InvalidInputError` for what is missing or wrong."""
        values, mistakes = {**self.values, **read_options(options, self.section)}, Mistakes()
        for name, value in values.items():
            if type(value) is FunctionName:  # before what is missing: `--env nothing.py:Env` alone is a wrong file
                with mistakes.collect():
                    value.check_file(name=name)
        with mistakes.collect():
            config: RunConfig = build(self.section, values)
        mistakes.raise_all()
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRole:
    """What a sampler is, and for whom."""

    name: str
    address: tuple[str, int]
    """Of the trainer's process."""
    key: str = field(repr=False)
    wait_s: float
    """How long the trainer's process may take to answer."""
    ends_with_parent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecipe:
    """The recipe that this process trains."""

    name: str
    words: Sequence[str]
    """Of a command line that opens it again."""
    code: str = ""
    """The Python file, if it is the user's own."""
    preflight: bool = True
    """Whether a few rollouts are sampled and shown before a run begins (`runs.preflight`)."""


open_recipe: ContextVar[OpenRecipe | None] = ContextVar("open_recipe", default=None)
"""None in a script that calls `train_model` itself."""


def load_recipe(path: Path | None) -> Recipe:
    """Load the recipe in a file, or the built-in one; raises `InvalidInputError` if the file has no recipe."""
    if path is None:
        return _recipe_from_module(importlib.import_module(BUILT_IN), Path("built-in recipe"))
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise InvalidInputError(f"RECIPE must be a Python or TOML file, got {path}: {found}")
    match path.suffix:
        case ".py":
            return _recipe_from_module(load_module(path), path)
        case ".toml":
            table = load_toml(path)
            base = table.pop("recipe", None)
            if not (base is None or isinstance(base, str)):
                raise InvalidInputError(f"{path}: recipe must be the path of a Python recipe, got {base!r}")
            module = importlib.import_module(BUILT_IN) if base is None else load_module(path.parent / base)
            recipe = _recipe_from_module(module, path)
            values = read_table(table, recipe.section, source=f"{path}: ", folder=path.parent)
            return dataclasses.replace(recipe, values=values)
        case _:
            raise InvalidInputError(f"RECIPE must be a Python or TOML file (.py, .toml), got {path}")


def _recipe_from_module(module: ModuleType, path: Path) -> Recipe:
    config, make_task = getattr(module, "Config", None), getattr(module, "make_task", None)
    if not (isinstance(config, type) and issubclass(config, RunConfig) and dataclasses.is_dataclass(config)):
        raise InvalidInputError(f"{path} must define Config, a frozen dataclass that extends RunConfig, got {config!r}")
    if not inspect.iscoroutinefunction(make_task):
        raise InvalidInputError(f"{path} must define `async def make_task(config: Config) -> Task`, got {make_task!r}")
    code = "" if module.__name__ == BUILT_IN else str(module.__file__)
    doc = inspect.cleandoc(module.__doc__ or "")
    return Recipe(name=path.name, doc=doc, section=section_of(config), make=make_task, code=code)
