"""Load the user's Python: a whole file, or one function or tool, written `rewards.py:correct` or `module:name`.

`fit:correct` is one that was given to `unbroken.fit` as it is: it is in no file that could be loaded.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from unbroken.errors import InvalidInputError
from unbroken.rollout.failures import format_error, format_frames

GIVEN = "fit:"
"""The beginning of the names that a config has for what was given to `unbroken.fit`."""
given_objects: ContextVar[Mapping[str, Any]] = ContextVar("given_objects", default={})  # noqa: B039  never changed
"""What this call of `unbroken.fit` was given, by the names that its config has for it: `fit:correct`."""


def get_given(reference: str, *, field: str) -> Any:
    """Get what was given to `unbroken.fit` by its name; an `InvalidInputError` begins with `field`."""
    found = given_objects.get()
    if reference not in found:
        raise InvalidInputError(
            f"{field} must name something in a file or package here, got {reference!r}: that was given to unbroken.fit "
            "in Python, and only that call has it"
        )
    return found[reference]


def load_module(path: Path) -> ModuleType:
    """Load a Python file as a module, run once unless it changes; raises `InvalidInputError` if that fails."""
    if not path.is_file():
        raise InvalidInputError(f"{path} must be a Python file, but it does not exist")
    name = f"unbroken_file:{path.resolve()}@{path.stat().st_mtime_ns}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"{path} must be a Python file, named with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look up their module by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InvalidInputError(f"{path} cannot be loaded: {format_error(error)}{format_frames(error)}") from error
    return module


class FunctionName(str):
    """A name that the package knows, or a function of the user's: `package.module:function`, `file.py:function`.

    In a TOML file, the path of a Python file is relative to that file, and so is that of `harbor:FOLDER`.
    """

    __slots__ = ()

    @property
    def is_reference(self) -> bool:
        """Whether it is a user's function."""
        return ":" in self

    def relative_to(self, folder: Path) -> FunctionName:
        """The same function, if the path of its file is relative to `folder`."""
        file, colon, name = self.rpartition(":")
        if file == "harbor":  # a folder
            return FunctionName(f"{file}{colon}{folder / name}")
        return FunctionName(f"{folder / file}{colon}{name}") if file.endswith(".py") else self

    def check_file(self, *, name: str) -> None:
        """Raise `InvalidInputError` if it is a function of a Python file that is not there; `name` is the setting."""
        file = self.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise InvalidInputError(f"{name} must name a file that exists, got {file}: there is no such file")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """For values of configs: any text."""
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


class CommandWord(FunctionName):
    """A word of a command, which runs in its own folder: a word with a dot or a slash that names a file stands for
    that file, by a path that is relative to the TOML file, or to the working directory on a command line.
    """

    __slots__ = ()

    def relative_to(self, folder: Path) -> CommandWord:
        """The path of the file, if there is one; otherwise the word as it is."""
        path = str((folder / self).absolute())
        is_file = ("." in self or "/" in self) and os.path.isfile(path)  # noqa: PTH113  Path.is_file may raise
        return CommandWord(path) if is_file else self


class DataName(FunctionName):
    """A file or folder of rows, or a data set's name on the hub. In a TOML file: what is next to it, if there is."""

    __slots__ = ()

    def relative_to(self, folder: Path) -> DataName:
        """The path of the file or folder, if there is one; otherwise the name as it is."""
        path = folder / self
        return DataName(path) if path.exists() else self


class ModelName(FunctionName):
    """The folder of a model or its name on the hub. In a TOML file: a folder next to the file, if there is one."""

    __slots__ = ()

    def relative_to(self, folder: Path) -> ModelName:
        """The path of the folder, if there is one; otherwise the name as it is."""
        path = folder / self
        return ModelName(path) if path.is_dir() else self


def load_function(reference: FunctionName, *, field: str, kinds: tuple[type[Any], ...] = ()) -> Any:
    """Load the function, or an object of one of `kinds`; an `InvalidInputError` begins with `field`."""
    source, _, name = reference.rpartition(":")
    if reference.startswith(GIVEN):
        found = get_given(str(reference), field=field)
    elif source.endswith(".py"):
        _, found = load_object(Path(reference), field=field)
    else:
        found = _load_from_package(source, name, reference, field)
    if not (callable(found) or isinstance(found, kinds)):
        raise InvalidInputError(f"{field} must name a function, got {reference!s}, which is {found!r}")
    return found


def _load_from_package(module: str, name: str, reference: str, field: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise InvalidInputError(
            f"{field} must name something that can be imported, got {str(reference)!r}: {format_error(error)}. "
            f"A function of a file is written FILE.py:{name}{format_frames(error)}"
        ) from error


def load_object(reference: Path, *, field: str) -> tuple[str, Any]:
    """Load `file.py:name`; returns the name and the object. An `InvalidInputError` begins with `field`."""
    file, colon, name = str(reference).rpartition(":")
    if str(reference).startswith(GIVEN):
        return name, get_given(str(reference), field=field)
    if not (colon and file.endswith(".py") and name.isidentifier()):
        raise InvalidInputError(f"{field} must be written file.py:name, got {str(reference)!r}")
    module = load_module(Path(file))
    if not hasattr(module, name):
        names = [each for each in vars(module) if not each.startswith("_")]
        similar = difflib.get_close_matches(name, names) or names
        raise InvalidInputError(
            f"{field} must name something in {file}, got {name!r}: the file has {', '.join(similar) or 'no names'}"
        )
    return name, getattr(module, name)
