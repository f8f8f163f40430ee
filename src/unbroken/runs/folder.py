"""The output folder of a run. It belongs to one recipe with one config; the same command continues the run in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError

_FILE = "recipe.json"
_PART = "recipe.json.part"
_FILES_OF_A_RUN = ("metrics", "checkpoints", "evaluation.jsonl")
"""Where a run looks for its earlier steps."""
_MAY_CHANGE = (
    "output",
    "engine.",
    "loop.num_steps",
    "loop.num_zero_variance_scored",
    "loop.outages.",
    "checkpoints.",
    "evaluation.",
    "trackers.",
)
"""Fields, and parts of the config (with a dot), that do not affect what a step trains on."""


def claim_folder(folder: Path, recipe: str, settings: Mapping[str, Any], *, anew: bool = False) -> bool:
    """Write the recipe's name and settings into `folder`; returns whether the folder holds a run already.

    With `anew`, an earlier run of the recipe is removed, and any config accepted.

    Raises:
        InvalidInputError: the folder holds the run of another recipe or config, or other files.
    """
    path = folder / _FILE
    if not path.exists():
        if folder.is_dir() and any(each.name != _PART for each in folder.iterdir()):
            raise InvalidInputError(f"output must be an empty folder or that of a run, and {folder} holds other files")
        _write(path, recipe, settings)
        return False
    name, before = _read(path)
    if name != recipe:
        raise InvalidInputError(
            f"output must be a folder without a run of another recipe: {folder} holds a run of {name}, not of {recipe}"
        )
    if anew:
        for file in _FILES_OF_A_RUN:
            shutil.rmtree(folder / file, ignore_errors=True)
            (folder / file).unlink(missing_ok=True)
        _write(path, recipe, settings)
        return False
    for each in sorted(name for name in before.keys() | settings.keys() if not _may_change(name)):
        old, new = before.get(each), settings.get(each)
        if old != new:
            raise InvalidInputError(
                f"{each} must be {old!r} as in the run in {folder}, got {new!r}: a run continues with the config that "
                "it began with. Give that value, or another --output"
            )
    if before != settings:  # of several processes, only the first writes
        _write(path, recipe, settings)
    return True


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        contents = json.loads(path.read_text("utf-8"))
        return contents["recipe"], contents["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} must hold the recipe and settings of the run in its folder: {type(error).__name__}: {error}"
        ) from None


def _write(path: Path, recipe: str, settings: Mapping[str, Any]) -> None:
    part = path.with_name(_PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"recipe": recipe, "settings": settings}, indent=1) + "\n", "utf-8")
        part.replace(path)
    except OSError as error:
        raise InvalidInputError(f"output must be a writable folder, got {path.parent}: {error}") from error


def _may_change(name: str) -> bool:
    return name in _MAY_CHANGE or name.startswith(tuple(each for each in _MAY_CHANGE if each.endswith(".")))
