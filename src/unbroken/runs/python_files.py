"""Load the user's Python files: a whole file, or one function or tool of it, written `rewards.py:correct`."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from unbroken.errors import InvalidInputError


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
        raise InvalidInputError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def load_object(reference: Path, *, field: str) -> tuple[str, Any]:
    """Load `file.py:name`; returns the name and the object. An `InvalidInputError` begins with `field`."""
    file, colon, name = str(reference).rpartition(":")
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
