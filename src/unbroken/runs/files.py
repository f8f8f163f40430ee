"""Python functions and tools from files of the user's: `rewards.py:correct`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.runs.loading import load_module


def named_object(reference: Path, *, field: str) -> tuple[str, Any]:
    """What `file.py:name` means: the name, and what the file binds it to.

    Raises:
        InvalidInputError: it is written otherwise, or there is no such file or name.
    """
    file, colon, name = str(reference).rpartition(":")
    if not (colon and file.endswith(".py") and name.isidentifier()):
        raise InvalidInputError(f"{field} must be written file.py:name, got {str(reference)!r}")
    module = load_module(Path(file))
    if not hasattr(module, name):
        names = [each for each in vars(module) if not each.startswith("_")]
        alike = difflib.get_close_matches(name, names) or names
        raise InvalidInputError(
            f"{field} must name what {file} has, got {name!r}: it has {', '.join(alike) or 'nothing'}"
        )
    return name, getattr(module, name)
